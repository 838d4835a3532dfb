"""The observer seam: which events are emitted, in which order, and the times that a `Finish` carries."""

import pickle
from collections.abc import Callable
from typing import TypeVar

import pytest

from protocol.codec import pack, unpack
from protocol.requests import Finish, FinishReason, RequestTimes
from protocol.sampling import Pooling
from protocol.steps import SchedulerOutput
from services.scheduler.core import observer as events
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.core.slots import DELIVER, DROP, LIVE
from services.scheduler.policies import ChunkedPolicy
from services.scheduler.request_log import RequestLog
from tests.event_recorder import EventRecorder
from tests.simulation.grammar import Compilation, structured
from tests.simulation.requests import finishes, generate, plans
from tests.simulation.results import result_of

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, num_blocks=32, block_size=4)
VOCAB, STOP = 50, 7
T = TypeVar("T")


class ObservedEngine:
    """A core, a recorder of its events, and a worker that answers when the test calls `answer`."""

    def __init__(self, depth: int = 2, limits: Limits = LIMITS, use_priority: bool = False) -> None:
        self.recorder = EventRecorder()
        self.compilation = Compilation(VOCAB)
        self.core = EngineCore(
            limits, ChunkedPolicy(), depth, VOCAB, use_priority=use_priority, compiler=self.compilation, hidden_size=1
        )
        self.core.observers.add(self.recorder)
        self.in_flight: list[SchedulerOutput] = []
        self.finished: dict[int, Finish] = {}

    @property
    def events(self) -> list[events.Event]:
        return self.recorder.events

    @property
    def names(self) -> list[str]:
        return [type(event).__name__ for event in self.events]

    def of(self, *types: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, types)]

    def generate(self, number: int = 0, prompt: int = 4, **fields: object) -> None:
        tokens = [(number * 11 + i) % VOCAB for i in range(prompt)]
        fields = {"max_tokens": 3, "stop_token_ids": (STOP,), "request_id": f"cmpl-{number}"} | fields
        self.core.add(0, generate(tokens, number, **fields))

    def dispatch(self) -> None:
        self.in_flight += plans(self.core)

    def answer(self, token: int = 5, **more: object) -> None:
        self.core.on_result(result_of(self.in_flight.pop(0), token, **more))
        self.take()

    def take(self) -> None:
        self.finished |= {finish.number: finish for finish in finishes(self.core)}

    def run(self) -> None:
        self.dispatch()
        while self.in_flight:
            self.answer()
            self.dispatch()


# -- order and completeness --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "middle"),
    [
        (1, ["StepDispatched", "ResultArrived", "ResultApplied", "DispatchStarted", "StepDispatched"]),
        (2, ["StepDispatched", "StepDispatched", "ResultArrived", "ResultApplied", "DispatchStarted"]),
    ],
)
def test_one_request_from_arrival_to_finish(depth: int, middle: list[str]) -> None:
    engine = ObservedEngine(depth)
    engine.generate(max_tokens=2)
    engine.run()
    assert engine.names == [
        *("RequestArrived", "DispatchStarted", *middle),
        *("ResultArrived", "RequestFinished", "ResultApplied", "DispatchStarted", "SlotsReleased"),
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_each_dispatched_step_is_applied_and_each_request_is_followed_to_its_end(depth: int) -> None:
    engine = ObservedEngine(depth)
    for number in range(6):
        engine.generate(number, prompt=3 + number, max_tokens=1 + number)
    engine.run()
    dispatched, applied = engine.of(events.StepDispatched), engine.of(events.ResultApplied)
    assert [event.step.step_id for event in dispatched] == [*range(1, len(dispatched) + 1)]
    assert [event.step for event in applied] == [event.step for event in dispatched]
    assert [event.result for event in applied] == [event.result for event in engine.of(events.ResultArrived)]
    entered = [key for event in dispatched for key in event.requests]
    assert entered == [(0, number) for number in range(6)]
    assert [(e.message.number, e.message.request_id) for e in engine.of(events.RequestArrived)] == [
        (number, f"cmpl-{number}") for number in range(6)
    ]
    finished = engine.of(events.RequestFinished)
    assert {event.finish.number: event.finish for event in finished} == engine.finished
    assert all(event.request_id == f"cmpl-{event.finish.number}" for event in finished)
    assert [key for event in applied for key in event.ended] == [(0, e.finish.number) for e in finished]
    assert sum(int(event.counts.sum()) for event in applied) == sum(1 + number for number in range(6))
    assert all(len(event.counts) == event.step.samples.sum() == len(event.states) for event in applied)


def test_the_states_of_a_result_show_which_rows_were_used() -> None:
    """One request was aborted, one was preempted by a request of better priority, with a step in flight."""
    engine = ObservedEngine(2, Limits(2, 64, 64, 32, 4), use_priority=True)
    engine.generate(0, max_tokens=9)
    engine.generate(1, max_tokens=9, priority=5)
    engine.dispatch()
    engine.generate(2, max_tokens=9, priority=1)
    engine.answer()
    engine.dispatch()
    engine.core.abort(0, [0])
    engine.answer()
    first, second = engine.of(events.ResultApplied)
    assert first.states.tolist() == [LIVE, LIVE]
    assert second.states.tolist() == [DROP, DELIVER]
    assert second.counts.tolist() == [0, 1]
    (preempted,) = engine.of(events.RequestPreempted)
    assert (preempted.request, preempted.cause) == ((0, 1), events.PreemptionCause.PRIORITY)
    assert preempted.slot == second.step.slots[1]


def test_a_result_that_ends_its_request_counts_no_token_behind_the_end() -> None:
    engine = ObservedEngine(depth=3)
    engine.generate(max_tokens=9)
    engine.dispatch()
    engine.answer(STOP)
    engine.answer()
    first, second = engine.of(events.ResultApplied)
    assert (first.counts.tolist(), first.ended) == ([1], ((0, 0),))
    assert (second.counts.tolist(), second.states.tolist(), second.ended) == ([0], [DROP], ())


def test_the_log_keeps_ids_of_open_requests_only_and_quotes_no_grammar(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    engine, log = ObservedEngine(), RequestLog()
    engine.core.observers.add(log)
    engine.generate(number=3, prompt=LIMITS.max_model_len)
    engine.generate(number=4)
    engine.generate(number=5, structured=structured(5))
    engine.core.on_grammar(2, "it has 'secret'")
    assert [f"cmpl-{number}".encode() in pickle.dumps(log) for number in (3, 4, 5)] == [False, True, False]
    assert "request_id=cmpl-5 finished: INVALID" in caplog.text
    assert "secret" not in caplog.text


def test_a_refused_request_was_never_queued() -> None:
    engine = ObservedEngine()
    timed(engine, 6.0, lambda: engine.generate(3, prompt=0), engine.take)
    arrived, refused = engine.of(events.RequestArrived, events.RequestRefused)
    assert isinstance(arrived, events.RequestArrived)
    assert refused == events.RequestRefused(0, "cmpl-3", engine.finished[3])
    assert engine.finished[3].times == RequestTimes(ended=6.0)


def test_an_abort_is_recorded_as_it_came_and_its_finish_is_not_sent() -> None:
    engine = ObservedEngine()
    engine.generate(1)
    engine.dispatch()
    engine.core.abort(0, [1, 8])
    engine.core.abort(0, [1])
    aborted, finished, again = engine.events[-3:]
    assert aborted == events.RequestsAborted(0, (1, 8))
    assert isinstance(finished, events.RequestFinished)
    assert (finished.finish.number, finished.finish.reason) == (1, FinishReason.ABORT)
    assert again == events.RequestsAborted(0, (1,))
    assert engine.core.take_outputs() == []


def test_grammars_that_are_ready_refused_or_of_an_aborted_request() -> None:
    engine = ObservedEngine()
    for number in range(3):
        engine.generate(number, structured=structured(number), max_tokens=1)
    engine.core.abort(0, [1])
    engine.core.on_grammar(1, engine.compilation.finish(1))
    engine.core.on_grammar(2, engine.compilation.finish(2))
    engine.core.on_grammar(3, "it is no grammar")
    assert engine.of(events.GrammarReady) == [
        events.GrammarReady(1, (0, 0), ""),
        events.GrammarReady(2, None, ""),
        events.GrammarReady(3, (0, 2), "it is no grammar"),
    ]
    assert [e.finish.reason for e in engine.of(events.RequestFinished)] == [FinishReason.ABORT, FinishReason.INVALID]
    engine.dispatch()
    (sent,) = engine.of(events.GrammarSent)
    assert sent.message.step_id == 1
    assert engine.names[-2:] == ["StepDispatched", "GrammarSent"]


def test_epochs_and_results_that_come_too_late() -> None:
    engine = ObservedEngine()
    engine.generate(max_tokens=9)
    engine.dispatch()
    engine.core.end_epoch()
    limits = Limits(2, 64, 64, 16, 4)
    engine.core.start_epoch(limits, ChunkedPolicy(), 2)
    engine.answer()
    assert engine.of(events.EpochEnded, events.EpochStarted) == [events.EpochEnded(1), events.EpochStarted(2, limits)]
    (arrived,), (dropped,) = engine.of(events.ResultArrived), engine.of(events.StaleResultDropped)
    assert dropped == events.StaleResultDropped(arrived.result.epoch, arrived.result.step_id)
    assert not engine.of(events.RequestPreempted, events.RequestFinished, events.ResultApplied)
    engine.dispatch()
    assert [event.requests for event in engine.of(events.StepDispatched)][2:] == [((0, 0),), ()]


def test_all_requests_fail_with_their_workers() -> None:
    engine = ObservedEngine()
    engine.generate(max_tokens=9)
    engine.dispatch()
    engine.core.fail_all("the workers are gone")
    assert engine.names[-2:] == ["AllRequestsFailed", "RequestFinished"]
    assert engine.of(events.AllRequestsFailed) == [events.AllRequestsFailed("the workers are gone")]


def test_a_reset_of_the_prefix_cache_preempts_what_runs() -> None:
    engine = ObservedEngine()
    engine.generate(max_tokens=9)
    engine.dispatch()
    engine.core.prefix_cache.reset(reset_running=True)
    assert engine.events[-2] == events.PrefixCacheReset(reset_running=True)
    (preempted,) = engine.of(events.RequestPreempted)
    assert (preempted.request, preempted.cause) == ((0, 0), events.PreemptionCause.RESET)


def test_a_preemption_for_blocks_comes_before_the_step_that_needed_them() -> None:
    engine = ObservedEngine(1, Limits(4, 64, 24, 6, 4))
    engine.generate(0, prompt=8, max_tokens=16)
    engine.generate(1, prompt=8, max_tokens=16)
    engine.run()
    preempted = engine.of(events.RequestPreempted)
    assert preempted
    assert all(event.cause is events.PreemptionCause.BLOCKS for event in preempted)
    assert {number: finish.num_preemptions for number, finish in engine.finished.items()} == {
        number: sum(event.request == (0, number) for event in preempted) for number in (0, 1)
    }
    at = engine.events.index(preempted[0])
    assert engine.names[at - 1] == "DispatchStarted"
    assert engine.names[at + 1] == "StepDispatched"


def test_listeners_come_and_go_while_the_engine_runs() -> None:
    engine, late = ObservedEngine(), EventRecorder()
    engine.generate(max_tokens=9)
    engine.dispatch()
    engine.core.observers.add(late)
    engine.answer()
    engine.core.observers.remove(late)
    engine.dispatch()
    assert [type(event) for event in late.events] == [events.ResultArrived, events.ResultApplied]
    engine.core.observers.remove(engine.recorder)
    before = len(engine.events)
    engine.run()
    assert len(engine.events) == before
    assert engine.finished[0].reason is FinishReason.LENGTH


def test_messages_of_events_are_those_that_leave() -> None:
    engine = ObservedEngine()
    engine.generate(max_tokens=1)
    sent = list(engine.core.dispatch())
    assert [event.plan for event in engine.of(events.StepDispatched)] == sent
    engine.in_flight.append(sent[0])
    engine.answer()
    (release,) = engine.core.dispatch()
    assert engine.of(events.SlotsReleased) == [events.SlotsReleased(release)]  # type: ignore[arg-type]
    assert len(engine.of(events.DispatchStarted)) == 2


# -- times -------------------------------------------------------------------------------------------------------


def timed(engine: ObservedEngine, now: float, *actions: Callable[[], None]) -> None:
    engine.core.advance(now)
    for action in actions:
        action()


@pytest.mark.parametrize("listens", [True, False])
def test_times_of_a_request(listens: bool) -> None:
    engine = ObservedEngine()
    if not listens:
        engine.core.observers.remove(engine.recorder)
    timed(engine, 1.0, lambda: engine.generate(max_tokens=2))
    timed(engine, 2.0, engine.dispatch)
    timed(engine, 3.0, engine.answer)
    timed(engine, 4.0, engine.answer)
    assert engine.finished[0].times == RequestTimes(queued=1.0, scheduled=2.0, first_token=3.0, ended=4.0)


def test_the_first_token_comes_with_the_last_chunk_of_a_prompt() -> None:
    engine = ObservedEngine(1, Limits(4, 4, 64, 32, 4))
    timed(engine, 1.0, lambda: engine.generate(prompt=10, max_tokens=2))
    for now in (2.0, 3.0, 4.0, 5.0):
        timed(engine, now, engine.dispatch, engine.answer)
    assert engine.finished[0].times == RequestTimes(1.0, 2.0, 4.0, 5.0)


def test_a_preempted_request_keeps_the_times_of_its_first_run() -> None:
    engine = ObservedEngine(2, Limits(1, 64, 64, 32, 4), use_priority=True)
    timed(engine, 1.0, lambda: engine.generate(0, max_tokens=4, priority=1))
    timed(engine, 2.0, engine.dispatch)
    timed(engine, 3.0, engine.answer)
    timed(engine, 4.0, lambda: engine.generate(1, max_tokens=1), engine.dispatch)
    assert engine.of(events.RequestPreempted)
    timed(engine, 5.0, engine.run)
    assert engine.finished[1].times == RequestTimes(4.0, 4.0, 5.0, 5.0)
    assert engine.finished[0].times == RequestTimes(1.0, 2.0, 3.0, 5.0)
    assert engine.finished[0].num_preemptions == 1


def test_a_first_token_that_arrives_after_the_preemption_counts() -> None:
    engine = ObservedEngine(3, Limits(1, 4, 64, 32, 4), use_priority=True)
    timed(engine, 1.0, lambda: engine.generate(0, prompt=8, max_tokens=4, priority=1), engine.dispatch)
    timed(engine, 2.0, lambda: engine.generate(1, max_tokens=1), engine.answer, engine.dispatch)
    assert engine.of(events.RequestPreempted)
    timed(engine, 3.0, engine.answer)
    assert engine.of(events.ResultApplied)[-1].states.tolist() == [DELIVER]
    timed(engine, 4.0, engine.run)
    assert engine.finished[0].times == RequestTimes(1.0, 1.0, 3.0, 4.0)


def test_a_replay_has_the_time_of_its_own_first_token() -> None:
    engine = ObservedEngine()
    engine.core.advance(1.0)
    engine.core.add(0, generate([1, 2, 3, 4, 5], prompt=3))
    timed(engine, 2.0, engine.dispatch)
    timed(engine, 3.0, engine.answer)
    timed(engine, 4.0, engine.run)
    assert engine.finished[0].times == RequestTimes(1.0, 2.0, 3.0, 4.0)


def test_times_of_an_aborted_request_that_did_not_happen_are_zero() -> None:
    engine = ObservedEngine(2, Limits(1, 64, 64, 32, 4))
    timed(engine, 1.0, lambda: engine.generate(0, max_tokens=9), engine.dispatch)
    timed(engine, 2.0, lambda: engine.generate(1))
    timed(engine, 3.0, lambda: engine.core.abort(0, [0, 1]))
    ends = [event.finish.times for event in engine.of(events.RequestFinished)]
    assert ends == [RequestTimes(1.0, 1.0, 0.0, 3.0), RequestTimes(2.0, 0.0, 0.0, 3.0)]


def test_a_request_is_queued_when_it_arrives_and_not_when_its_grammar_is_ready() -> None:
    engine = ObservedEngine()
    timed(engine, 1.0, lambda: engine.generate(0, structured=structured(0)))
    timed(engine, 2.0, lambda: engine.core.on_grammar(1, "it is no grammar"), engine.take)
    assert engine.finished[0].times == RequestTimes(1.0, 0.0, 0.0, 2.0)


def test_an_embedding_has_no_first_token() -> None:
    engine = ObservedEngine()
    timed(engine, 1.0, lambda: engine.generate(max_tokens=1, pooling=Pooling.LAST), engine.dispatch)
    slot = int(unpack(engine.in_flight[0].slots)[0])
    timed(engine, 2.0, lambda: engine.answer(embedding_slots=pack([slot]), embeddings=b"\0\0\0\0"))
    assert engine.finished[0].times == RequestTimes(1.0, 1.0, 0.0, 2.0)
