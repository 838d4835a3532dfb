"""Grammars, embeddings and log-probabilities in the core, event by event."""

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from protocol.codec import pack, unpack
from protocol.requests import FinishReason, RequestOutputs
from protocol.rows import LogprobRows
from protocol.sampling import GrammarKind, Pooling, StructuredOutputParams
from protocol.steps import GrammarOutput, SchedulerOutput
from protocol.transport import Client
from services.config import SchedulerConfig
from services.scheduler import structured_output
from services.scheduler.core import compiling
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.core.results import UnknownResult
from services.scheduler.grammar.base import OVERLOADED
from services.scheduler.policies import ChunkedPolicy
from services.scheduler.service import Service
from services.scheduler.structured_output import StructuredOutput
from tests.simulation.grammar import Compilation
from tests.simulation.requests import finishes, generate
from tests.simulation.results import result_of

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=32, num_blocks=24, block_size=4)
VOCAB, HIDDEN = 50, 4
COUNTING = StructuredOutputParams(GrammarKind.CHOICE, '["5"]', (7,))


class Counting:
    """A `Grammar` of the output 5, 6, 7 and so on."""

    def __init__(self) -> None:
        self.next = 5
        self.filled = 0

    def accept(self, token_id: int) -> bool:
        self.next += 1
        return token_id == self.next - 1

    def fill(self, mask: np.ndarray) -> None:
        self.filled += 1
        mask[:] = 0
        mask[self.next // 32] = 1 << self.next % 32


def engine(depth: int = 2, **options: object) -> EngineCore:
    options = {"compiler": Compilation(VOCAB), "hidden_size": HIDDEN} | options
    return EngineCore(LIMITS, ChunkedPolicy(), depth, VOCAB, **options)  # type: ignore[arg-type]


def outputs(core: EngineCore) -> list[RequestOutputs]:
    return [message for _, message in core.take_outputs()]


def bits(grammar: GrammarOutput) -> dict[int, list[int]]:
    """Return slot -> ids that may be sampled."""
    masks = np.frombuffer(grammar.bitmask, np.uint8).reshape(len(grammar.slots) // 4, -1)
    allowed = np.unpackbits(masks, axis=1, bitorder="little", count=VOCAB)
    return {
        slot: np.flatnonzero(row).tolist() for slot, row in zip(unpack(grammar.slots).tolist(), allowed, strict=True)
    }


# -- a request whose grammar is being compiled -------------------------------------------------------------------


def test_it_is_submitted_with_its_ends_and_waits_beside_the_queue() -> None:
    compilation = Compilation(VOCAB)
    core = engine(1, compiler=compilation)
    core.add(0, generate(structured=COUNTING, eos_token_ids=(9, 8)))
    assert list(compilation.waiting.values()) == [(COUNTING, (9, 8))]
    assert not core.has_requests
    assert list(core.dispatch()) == []
    waiting = {name: count for name, count in core.stats().items() if name.startswith("num_requests_waiting")}
    assert [*waiting.values()] == [1, 0, 1], "in all, for capacity, deferred"
    core.on_grammar(1, Counting())
    assert core.has_requests
    plan, grammar = core.dispatch()
    assert plan.has_structured_output_requests
    assert bits(grammar) == {0: [5]}


def test_its_order_is_that_of_its_arrival() -> None:
    """A request that arrived later comes after it."""
    core = engine()
    core.add(0, generate([1], number=0, structured=COUNTING))
    core.add(0, generate([2], number=1))
    core.on_grammar(1, Counting())
    assert [request.number for request in core.store.waiting] == [0, 1]


def test_request_may_be_sent_again_if_its_grammar_was_not_tried() -> None:
    core = engine()
    for number, error in enumerate((OVERLOADED, "it is no grammar")):
        core.add(0, generate([1], number=number, structured=COUNTING))
        core.on_grammar(number + 1, error)
    ends = [(finish.reason, finish.message) for finish in finishes(core)]
    assert ends == [(FinishReason.REJECTED, OVERLOADED), (FinishReason.INVALID, "it is no grammar")]


def test_replayed_tokens_advance_the_grammar_or_end_the_request() -> None:
    core = engine(1)
    core.add(0, generate([1, 2, 5, 6], number=0, prompt=2, structured=COUNTING))
    core.add(0, generate([1, 2, 5, 9], number=1, prompt=2, structured=COUNTING))
    replayed, wrong = Counting(), Counting()
    core.on_grammar(1, replayed)
    core.on_grammar(2, wrong)
    (finish,) = finishes(core)
    assert (finish.number, finish.reason) == (1, FinishReason.INVALID)
    assert "delivered before do not match" in finish.message
    assert replayed.next == 7
    _, grammar = core.dispatch()
    assert bits(grammar) == {0: [7]}


def test_abort_while_it_is_compiled() -> None:
    compilation = Compilation(VOCAB)
    core = engine(compiler=compilation)
    core.add(0, generate(structured=COUNTING))
    core.add(1, generate(structured=COUNTING))
    core.abort(0, [0])
    core.drop_frontend(1)
    assert not core.requests
    assert compilation.cancelled == {1, 2}
    core.on_grammar(1, Counting())
    core.on_grammar(2, "too late")
    assert not core.has_requests
    assert finishes(core) == []


# -- steps -------------------------------------------------------------------------------------------------------


def test_a_step_without_a_constrained_row_that_samples_needs_none() -> None:
    """The first chunk of a constrained prompt, beside a request that decodes."""
    core = engine(1)
    core.add(0, generate([1] * 2, number=1, max_tokens=9))
    core.add(0, generate([1] * 20, number=0, structured=COUNTING))
    core.on_grammar(2, Counting())
    core.epoch.policy = ChunkedPolicy(long_prefill_token_threshold=16)
    (plan,) = core.dispatch()
    assert list(plan.samples) == [1, 0]
    assert not plan.has_structured_output_requests


# -- embeddings and log-probabilities ----------------------------------------------------------------------------


def pooling_step() -> tuple[EngineCore, SchedulerOutput]:
    core = engine(1)
    core.add(0, generate(number=0, max_tokens=1, pooling=Pooling.LAST))
    core.add(0, generate(number=1))
    (plan,) = core.dispatch()
    assert plan.new[0].pooling is Pooling.LAST
    return core, plan


def test_a_missing_embedding_ends_only_its_request() -> None:
    core, plan = pooling_step()
    core.on_result(result_of(plan, (9, 10)))
    (message,) = outputs(core)
    assert [(f.number, f.reason) for f in message.finished] == [(0, FinishReason.ERROR)]
    assert message.finished[0].message == "the workers returned no embedding"
    assert unpack(message.numbers, np.uint32).tolist() == [1]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    config = {f"{kind}_endpoint": f"ipc://{tmp_path}/{kind}" for kind in ("worker", "client")}
    service = Service(SchedulerConfig.model_validate(config), 1, StructuredOutput(None, None))
    service.engine = engine(2)
    yield service
    service.frontends.close(0)
    service.workers.close(0)


def test_grammars_whose_replay_takes_long_do_not_stop_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one alone that has many tokens to read: it takes several turns, and others get theirs."""
    monkeypatch.setattr(structured_output, "GRAMMAR_SECONDS", 0.0)
    monkeypatch.setattr(compiling, "REPLAYED_TOKENS", 2)
    core, grammars = engine(2), {ticket: Counting() for ticket in (1, 2, 3)}
    for number, outputs in enumerate(([], [5, 6, 7, 8, 9], [])):
        core.add(0, generate([1, 2, *outputs], number=number, prompt=2, max_tokens=9, structured=COUNTING))
    compiled = [[*grammars.items()]]
    compiler = SimpleNamespace(take=lambda: compiled.pop() if compiled else [])
    structured = StructuredOutput(compiler, None)  # type: ignore[arg-type]
    for done, read in ((1, 5), (1, 7), (2, 7), (2, 9), (3, 10)):
        structured.read(core)
        assert (len(core.store.waiting), grammars[2].next) == (done, read)
        assert bool(structured.grammars) == (done < 3)


def test_embeddings_of_each_step_are_sent_at_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of two steps that arrive together may have too many for one message. The service ends when it is idle."""
    core, sent, results = service.engine, list[RequestOutputs](), []
    assert core is not None
    for number in range(2):
        core.add(0, generate(number=number, max_tokens=1, pooling=Pooling.LAST))
        (plan,) = core.dispatch()
        results.append((b"w", result_of(plan, 9, embedding_slots=pack([number]), embeddings=bytes(4 * HIDDEN))))
    monkeypatch.setattr(service.workers, "receive", lambda: iter(results))
    monkeypatch.setattr(service.frontends, "send", lambda _, outputs: sent.append(outputs))
    worker = Client(service.workers.server.endpoint)
    worker.send_hello("worker", "w")
    signal, wakeup = socket.socketpair()
    with closing(worker), signal, wakeup:
        signal.send(b".")
        assert service.run(wakeup) == 0
    assert [len(message.embeddings) for message in sent] == [1, 1]


@pytest.mark.parametrize(
    ("slots", "size", "says"),
    [
        ([0, 0, 0], HIDDEN, "are no embeddings"),
        ([], HIDDEN, "are no embeddings"),
        ([-1], HIDDEN, "are no embeddings"),
        ([0], HIDDEN + 1, "another size"),
    ],
)
def test_invalid_embeddings_fail_the_step(slots: list[int], size: int, says: str) -> None:
    core, plan = pooling_step()
    wrong = result_of(plan, (9, 10), embedding_slots=pack(slots), embeddings=bytes(4 * size))
    with pytest.raises(UnknownResult, match=says):
        core.on_result(wrong)


def scored(slot: int, position: int = 3, rank: int = 1) -> object:
    one = np.ones(1, np.int32)
    return LogprobRows(one * slot, one * position, one, one * rank, one * 5, np.ones(1, np.float32)).to_message()


def test_log_probabilities_go_to_their_frontends_with_the_numbers_of_requests() -> None:
    core, first = engine(1), 3_000_000_000
    for frontend in (3, 4):
        core.add(frontend, generate(number=first + frontend, logprobs=0))
    (plan,) = core.dispatch()
    rows = LogprobRows.concatenate([LogprobRows.from_message(scored(slot)) for slot in (0, 1, 0)])  # type: ignore[arg-type]
    core.on_result(result_of(plan, (5, 5), logprobs=rows.to_message()))
    got = {frontend: message.logprobs for frontend, message in core.take_outputs()}
    owners = {frontend: unpack(rows.owners, np.uint32).tolist() for frontend, rows in got.items() if rows}
    assert owners == {3: [first + 3] * 2, 4: [first + 4]}
    assert unpack(got[4].positions).tolist() == [3]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (scored(3), "of slots that are not its own"),
        (scored(-1), "of slots that are not its own"),
        (scored(0, rank=0), "negative"),
        (scored(0, position=-1), "negative"),
    ],
)
def test_invalid_log_probabilities_fail_the_step(rows: object, says: str) -> None:
    core = engine(1)
    core.add(0, generate(logprobs=0))
    (plan,) = core.dispatch()
    with pytest.raises(UnknownResult, match=says):
        core.on_result(result_of(plan, 5, logprobs=rows))


def test_drafts_that_are_no_column_fail_the_step() -> None:
    core = engine(1)
    core.add(0, generate())
    (plan,) = core.dispatch()
    with pytest.raises(UnknownResult, match="a column of 3 bytes"):
        core.on_result(result_of(plan, 5, draft_token_ids=bytes(3)))
