"""Aborts, reused numbers, pool limits, priorities, cache resets and worker faults."""

import msgspec
import pytest

from protocol.codec import pack
from protocol.requests import FinishReason
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import RequestFinished
from services.scheduler.core.request import RequestStatus
from services.scheduler.core.results import UnknownResult
from services.scheduler.core.slots import SlotIds
from services.scheduler.policies import ChunkedPolicy, SchedulerView
from tests.event_recorder import EventRecorder
from tests.simulation.test_acceptance import DEPTHS, ROOMY, entered
from tests.simulation.world import RESULTS, World, params, prompt_of


def num_aborted(recorder: EventRecorder) -> int:
    ends = [event.finish.reason for event in recorder.events if isinstance(event, RequestFinished)]
    return ends.count(FinishReason.ABORT)


@pytest.mark.parametrize("depth", DEPTHS)
def test_abort_with_a_prefill_chunk_in_flight(depth: int) -> None:
    world = World(Limits(4, 16, 128, 32, 4), depth)
    stream = world.add(prompt_of(60), params(5))
    world.dispatch()
    assert world.stage(stream) == "prefill in flight"
    world.abort(stream)
    assert world.epoch.kv.pool.num_free < 32, "the blocks that the chunk still writes are behind the fence"
    world.drain()
    assert stream.tokens == []


@pytest.mark.parametrize("depth", DEPTHS)
def test_abort_twice_after_the_finish_of_an_unknown_one_and_of_all(depth: int) -> None:
    world = World(ROOMY, depth)
    streams = [world.add(prompt_of(9, seed=i), params(3 + 20 * i, eos=False)) for i in range(5)]
    while streams[0].finish is None:
        world.step()
    recorder = EventRecorder()
    world.engine.observers.add(recorder)
    world.abort(streams[0], streams[1], streams[1])
    world.engine.abort(0, [977])
    world.engine.abort(7, [0])
    world.dispatch()
    world.abort(*streams)
    world.drain()
    assert streams[0].finish is not None
    assert num_aborted(recorder) == 4


@pytest.mark.parametrize("depth", DEPTHS)
def test_abort_crosses_a_finish_that_is_not_yet_published(depth: int) -> None:
    """The last token was processed in this turn before the abort is read: the abort has no effect."""
    world = World(ROOMY, depth)
    stream = world.add(prompt_of(9), params(1))
    world.dispatch()
    world.complete()
    recorder = EventRecorder()
    world.engine.observers.add(recorder)
    world.engine.abort(stream.frontend, [stream.number])
    world.drain()
    assert stream.finish is not None
    assert num_aborted(recorder) == 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_same_number_again_while_the_old_request_is_in_flight(depth: int) -> None:
    world = World(Limits(2, 64, 128, 32, 4), depth)
    old = world.add(prompt_of(20), params(30, eos=False), number=5)
    for _ in range(4):
        world.step()
    world.dispatch()
    world.abort(old)
    before = list(old.tokens)
    new = world.add(prompt_of(20, seed=1), params(8, eos=False), number=5)
    world.drain()
    assert new.tokens == new.answer.tokens
    assert old.tokens == before


class WorstFirst(ChunkedPolicy):
    """Requests take from the budget in reverse order, so that a victim may have been chosen before."""

    def order(self, view: SchedulerView) -> SlotIds:
        return view.running[::-1]


def test_a_victim_that_was_chosen_in_the_same_call_leaves_no_trace() -> None:
    """The choice is repeated without the victim and committed as a whole. Its budget is available to others, and no
    request hits blocks that it would have written."""
    world = World(Limits(4, 6, 16, 4, 4), 1, use_priority=True, policy=WorstFirst(4))
    a = world.add(prompt_of(12), params(1, eos=False))
    world.step()
    b = world.add(prompt_of(12, seed=1), params(1, eos=False))
    world.step()
    assert (a.scheduled, b.scheduled) == (8, 2)
    world.dispatch()
    # Chosen first, the victim would have taken 4 of the 6 tokens and the last block.
    assert (a.scheduled, b.scheduled) == (12, 2)
    assert b.request.status is RequestStatus.PREEMPTED
    world.complete()
    c = world.add(b.prompt, params(1, eos=False), priority=-1)
    world.dispatch()
    assert c.scheduled == 4
    new, start, _ = entered(world, 2)
    assert (new.num_prompt_tokens, start) == (12, 0), "no hit on blocks that the victim never wrote"
    world.drain()


@pytest.mark.parametrize("reset_running", [False, True])
@pytest.mark.parametrize("depth", DEPTHS)
def test_reset_prefix_cache_with_a_full_queue(depth: int, reset_running: bool) -> None:
    world = World(Limits(4, 32, 128, 64, 4), depth)
    for i in range(6):
        world.add(prompt_of(20 + i), params(15, eos=False))
    for _ in range(3):
        world.step()
    for _ in range(3):
        world.dispatch()
        assert world.engine.queue.full
        world.reset_prefix_cache(reset_running)
        world.step()
    world.drain()
    assert (world.store.counters["num_preemptions"] > 0) == reset_running
    assert all(stream.tokens == stream.answer.tokens for stream in world.streams)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_worker_fault_ends_every_request_with_an_error(depth: int) -> None:
    """One request finishes with the last result before the fault; others are running, waiting, or wait for stale
    rows."""
    world = World(Limits(2, 64, 128, 32, 4), depth, use_priority=True)
    done = world.add(prompt_of(5), params(1, eos=False))
    streams = [world.add(prompt_of(20, seed=i), params(30, eos=False)) for i in range(3)]
    world.dispatch()
    world.complete()
    world.dispatch()
    streams.append(world.add(prompt_of(8), params(5), priority=-1))
    world.complete()
    world.fail_all("RuntimeError: out of memory")
    world.frontends.receive()
    assert done.finish.reason is FinishReason.LENGTH
    for stream in streams:
        assert stream.finish.reason is FinishReason.ERROR
        assert stream.finish.message == "RuntimeError: out of memory"
    world.checker.check_drained()
    assert not world.engine.requests
    for _ in range(len(world.pending)):  # results that are still on their way are dropped
        world.expected_stale += 1
        world.complete()
    assert world.dispatch() == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": pack([1, 0])},
        {"generations": pack([1, 2])},
        {"counts": pack([1, 0])},
        {"counts": pack([2, 1])},
        {"counts": b""},
        {"token_ids": pack([1])},
        {"token_ids": b"\0\0\0\0\0\0\0"},
        {"token_ids": pack([1, 64])},
        {"token_ids": pack([-1, 3])},
        {"slots": b"", "generations": b"", "counts": b"", "token_ids": b""},
    ],
)
def test_a_result_that_does_not_match_its_plan_is_refused_whole(wrong: dict[str, bytes]) -> None:
    world = World(ROOMY, 2)
    streams = [world.add(prompt_of(5, seed=i), params(9, eos=False)) for i in range(2)]
    world.dispatch()
    result = RESULTS.decode(world.pending[1])
    with pytest.raises(UnknownResult):
        world.engine.on_result(msgspec.structs.replace(result, **wrong))
    world.frontends.receive()
    assert [stream.tokens for stream in streams] == [[], []]
