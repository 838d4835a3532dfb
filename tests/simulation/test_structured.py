"""Deferred sampling, and what may happen to its requests before the masks are sent.

The world checks answers, masks and the state of every grammar after every transition.
"""

from dataclasses import replace

import pytest

from protocol.codec import unpack
from protocol.sampling import Pooling
from protocol.steps import GrammarOutput, SchedulerOutput, StepMessage
from services.scheduler.core.limits import Limits
from services.scheduler.core.slots import DELIVER, DROP
from services.scheduler.policies import ChunkedPolicy
from tests.simulation.grammar import structured
from tests.simulation.oracle import MESSAGES
from tests.simulation.world import SimulatedStream, World, params, prompt_of

ROOMY = Limits(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=256, num_blocks=128, block_size=16)


class Recorded(World):
    """A world that records each message with the results that had been applied when it was sent."""

    def __init__(self, limits: Limits, depth: int) -> None:
        super().__init__(limits, depth)
        self.sent: list[tuple[StepMessage, int]] = []

    def _on_sent(self, frame: bytes) -> None:
        self.sent.append((MESSAGES.decode(frame), self.checker.confirmed))


def deferred(
    depth: int = 2, seed: int = 1, neighbours: int = 1
) -> tuple[World, SimulatedStream, list[SimulatedStream]]:
    """Return a world whose newest step waits for its masks: the token before is in flight."""
    world = World(ROOMY, depth)
    others = [world.add(prompt_of(9, 50 + i), params(20, eos=False)) for i in range(neighbours)]
    stream = world.add(prompt_of(12), params(20, eos=False), structured=structured(seed))
    world.compiled()
    world.dispatch()
    assert world.stage(stream) == "sampling deferred"
    assert len(world.plans) == 2, "its forward pass runs ahead"
    return world, stream, others


# -- the order of messages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_is_sampled_before_the_next_one_executes(depth: int, stages: int) -> None:
    """At most one sampling is deferred, and its masks are formed when no token before it is in flight."""
    world = Recorded(replace(ROOMY, stages=stages), depth * stages)
    for i in range(6):
        world.add(prompt_of(5 + i, i), params(6 + i, eos=False), structured=structured(i) if i % 2 else None)
        while world.compilation.waiting:
            world.compiled()
        world.step()
    world.drain()
    waiting: SchedulerOutput | None = None
    newest: dict[int, int] = {}
    """Slot -> the newest step that sampled for it."""
    for message, confirmed in world.sent:
        if isinstance(message, SchedulerOutput):
            assert waiting is None, "a step was sent while another one waits for its masks"
            waiting = message if message.has_structured_output_requests else None
            before = dict(newest)
            slots, samples = unpack(message.slots).tolist(), list(message.samples)
            newest |= {slot: message.step_id for slot, samples_ in zip(slots, samples, strict=True) if samples_}
            newest |= {new.slot: 0 for new in message.new if new.slot not in slots}
        elif isinstance(message, GrammarOutput):
            assert message.step_id == waiting.step_id
            assert all(before.get(slot, 0) <= confirmed for slot in unpack(message.slots).tolist())
            waiting = None
    assert world.coverage["sampling: with a grammar"] > 10
    assert waiting is None


def test_neighbours_of_a_request_that_is_compiled_lose_no_step() -> None:
    """It waits beside the queue and delays no other request, and its first token is masked."""
    world = World(replace(ROOMY, max_num_seqs=2), 2)
    waits = world.add(prompt_of(12), params(5, eos=False), structured=structured(3))
    others = [world.add(prompt_of(9, 50 + i), params(8, eos=False)) for i in range(3)]
    for _ in range(8):
        world.step()
    assert [len(other.tokens) for other in others[:2]] == [8, 8]
    assert (len(waits.tokens), world.stage(waits)) == (0, "compiling")
    world.compiled()
    world.drain()
    assert len(waits.tokens) == 5


# -- while a sampling is deferred --------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [2, 3])
def test_abort(depth: int) -> None:
    world, stream, others = deferred(depth)
    world.abort(stream)
    world.dispatch()
    assert not world.engine.queue.unmasked, "no masks are needed"
    world.drain()
    assert len(others[0].tokens) == 20
    assert not stream.tokens


@pytest.mark.parametrize("state", [DELIVER, DROP])
def test_preemption(state: int) -> None:
    """Its tokens in flight are delivered and advance its grammar, or are dropped and sampled again."""
    world, stream, others = deferred()
    world.preempt(stream, state)
    assert stream.request.stale_rows == (2 if state == DELIVER else 0)
    world.dispatch()
    assert (not world.engine.queue.unmasked) == (state == DROP), "a delivered token still needs its mask"
    world.drain()
    assert (len(stream.tokens), len(others[0].tokens)) == (20, 20)
    assert stream.finish.num_preemptions == 1


def test_the_token_before_ends_the_request() -> None:
    """Its row has no constraint then, and its sampled token is ignored."""
    world = World(ROOMY, 2)
    prompt = prompt_of(12)
    probe = world.add(prompt, params(3, eos=False), structured=structured(1))
    world.drain()
    stop = probe.tokens[0]
    stream = world.add(prompt, params(9, stop, eos=False), structured=structured(1))
    other = world.add(prompt_of(9, 50), params(9, eos=False))
    world.compiled()
    world.dispatch()
    assert world.stage(stream) == "sampling deferred"
    world.complete()
    assert stream.request.finished
    world.drain()
    assert (stream.tokens, stream.finish.stop_reason) == ([stop], stop)
    assert len(other.tokens) == 9
    assert world.coverage["sampling: of a request that ended before"] == 1


def test_lost_workers() -> None:
    """No sampling is deferred in the next epoch, and grammars have accepted exactly the confirmed tokens."""
    world, stream, others = deferred(3)
    world.complete()
    world.dispatch()
    assert world.engine.queue.unmasked
    world.publish()
    confirmed = list(stream.tokens)
    assert confirmed
    world.end_epoch()
    assert not world.engine.queue.unmasked
    world.start_epoch(ROOMY, ChunkedPolicy())
    world.drain()
    assert stream.tokens[: len(confirmed)] == confirmed
    assert (len(stream.tokens), len(others[0].tokens)) == (20, 20)


# -- embeddings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_embeddings_beside_generation(pooling: Pooling, depth: int) -> None:
    """In chunks, with a prefix that others have cached: a mean does not use it."""
    world = World(replace(ROOMY, max_num_batched_tokens=20), depth)
    text = prompt_of(70)
    world.add(text, params(4, eos=False))
    world.drain()
    generating = world.add(prompt_of(30, 1), params(12, eos=False))
    pooled = [world.add(text, params(1, eos=False), pooling=pooling) for _ in range(3)]
    world.drain()
    assert all(stream.embedded and not stream.tokens for stream in pooled)
    assert [stream.hit > 0 for stream in pooled] == [pooling is Pooling.LAST] * 3
    assert len(generating.tokens) == 12
