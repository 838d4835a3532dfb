"""Columns of a message as arrays. Columns that contradict one another are refused."""

from typing import Any

import msgspec
import numpy as np
import pytest

from protocol.codec import ProtocolError, pack
from protocol.logprobs import Logprobs
from protocol.requests import RequestOutputs
from protocol.rows import EmbeddingRows, GrammarRows, LogprobRows, OutputRows, ProgressRows, ResultRows, StepRows
from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput

PLAN = SchedulerOutput(
    epoch=1,
    step_id=1,
    slots=pack([4, 0]),
    generations=pack([1, 9]),
    starts=pack([0, 12]),
    counts=pack([5, 1]),
    samples=b"\0\1",
    block_slots=pack([4, 4, 0]),
    block_ids=pack([7, 8, 3]),
    released=pack([2]),
)
RESULT = ModelRunnerOutput(1, 1, pack([4, 0]), pack([1, 9]), pack([2, 0]), pack([11, 12]), drafted=pack([3, 0]))
LOGPROBS = Logprobs(pack([4]), pack([7]), pack([1]), pack([1]), pack([11]), np.float32([-0.5]).tobytes())
THREE_ROWS = Logprobs(*[pack([1, 2, 3])] * 4, b"", b"")
OUTPUTS = RequestOutputs(pack(np.array([2**32 - 1, 3], np.uint32)), pack([0, 5]), pack([11, 12]))


def test_rows_of_a_plan() -> None:
    plan = StepRows.from_message(PLAN)
    columns = [*vars(plan.rows).values(), *plan[1:]]
    assert [column.tolist() for column in columns] == [
        [4, 0], [1, 9], [0, 12], [5, 1], [False, True], [0, 0], [4, 4, 0], [7, 8, 3], [2], [],
    ]  # fmt: skip
    assert not any(column.flags.writeable for column in columns)


def test_rows_of_a_result() -> None:
    rows = ResultRows.from_message(RESULT)
    assert [column.tolist() for column in rows] == [[4, 0], [1, 9], [2, 0], [11, 12], [3, 0]]


def test_rows_of_outputs() -> None:
    rows = OutputRows.from_message(OUTPUTS)
    assert [column.tolist() for column in rows] == [[2**32 - 1, 3], [0, 5], [11, 12]]


def test_message_without_rows() -> None:
    assert not len(StepRows.from_message(SchedulerOutput(1, 1, b"", b"", b"", b"", b"")).rows.slots)
    assert not len(ResultRows.from_message(ModelRunnerOutput(1, 1, b"", b"", b"", b"")).slots)
    assert not len(OutputRows.from_message(RequestOutputs(b"", b"", b"")).numbers)


@pytest.mark.parametrize("name", ["slots", "generations", "starts", "counts", "samples", "block_slots", "block_ids"])
def test_plan_with_a_short_column_is_refused(name: str) -> None:
    shorter = getattr(PLAN, name)[: -1 if name == "samples" else -4]
    with pytest.raises(ProtocolError, match=f"differ in length.*'{name}': "):
        StepRows.from_message(msgspec.structs.replace(PLAN, **{name: shorter}))


@pytest.mark.parametrize("name", ["slots", "generations", "starts", "counts", "block_slots", "block_ids", "released"])
def test_plan_with_a_negative_number_is_refused(name: str) -> None:
    column = np.frombuffer(getattr(PLAN, name), np.int32).copy()
    column[-1] = -1
    with pytest.raises(ProtocolError, match="negative"):
        StepRows.from_message(msgspec.structs.replace(PLAN, **{name: pack(column)}))


@pytest.mark.parametrize(
    ("rows", "message", "change", "text"),
    [
        (StepRows, PLAN, {"counts": pack([5, 0])}, "a row without a token"),
        (StepRows, PLAN, {"counts": pack([5, -(2**31)])}, "negative"),
        (StepRows, PLAN, {"samples": b"\0\2"}, "samples"),
        (StepRows, PLAN, {"samples": b"\xff\1"}, "samples"),
        (StepRows, PLAN, {"masked": pack([4])}, "masks for a slot without a row that samples"),
        (StepRows, PLAN, {"speculation_rests": True, "num_speculative_tokens": 1}, "a drafter that rests"),
        (ResultRows, RESULT, {"slots": pack([4])}, "differ in length"),
        (ResultRows, RESULT, {"generations": pack([1, 9, 9])}, "differ in length"),
        (ResultRows, RESULT, {"counts": pack([2])}, "differ in length"),
        (ResultRows, RESULT, {"drafted": pack([3])}, "differ in length"),
        (ResultRows, RESULT, {"counts": pack([1, 0])}, "2 tokens, but its rows count 1"),
        (ResultRows, RESULT, {"token_ids": pack([11])}, "1 tokens, but its rows count 2"),
        # The sum of these two is -2 in int32.
        (ResultRows, RESULT, {"counts": pack([2**31 - 1, 2**31 - 1])}, "rows count 4294967294"),
        (ResultRows, RESULT, {"counts": pack([3, -1])}, "negative"),
        (ResultRows, RESULT, {"slots": pack([4, -1])}, "negative"),
        (ResultRows, RESULT, {"drafted": pack([-1, 0])}, "negative"),
        (ResultRows, RESULT, {"token_ids": pack([11, -12])}, "negative"),
        (ResultRows, RESULT, {"token_ids": b"\0"}, "does not hold int32"),
        (OutputRows, OUTPUTS, {"numbers": b""}, "differ in length"),
        (OutputRows, OUTPUTS, {"indices": pack([0])}, "differ in length"),
        (OutputRows, OUTPUTS, {"indices": pack([0, -1])}, "negative"),
        (OutputRows, OUTPUTS, {"token_ids": pack([-1, 0])}, "negative"),
        (OutputRows, OUTPUTS, {"numbers": b"\0\0"}, "does not hold uint32"),
        (ProgressRows, RESULT, {"progress_slots": pack([4, 4]), "progress_frontiers": pack([1, 2])}, "a slot twice"),
        (EmbeddingRows, RESULT, {"embedding_slots": pack([-1]), "embeddings": bytes(8)}, "no embeddings"),
        (EmbeddingRows, RESULT, {"embeddings": bytes(8)}, "no embeddings of 0 slots"),
        (LogprobRows, LOGPROBS, {"owners": pack([4, 5])}, "differ in length"),
        (LogprobRows, LOGPROBS, {"values": b""}, "differ in length"),
        (LogprobRows, LOGPROBS, {"positions": pack([-1])}, "negative"),
        (LogprobRows, LOGPROBS, {"token_ids": pack([-1])}, "negative"),
        (LogprobRows, LOGPROBS, {"token_ranks": pack([0])}, "negative"),
        (LogprobRows, LOGPROBS, {"token_ranks": pack([-(2**31)])}, "negative"),
        (LogprobRows, LOGPROBS, {"counts": pack([2])}, "differ in number"),
        (LogprobRows, THREE_ROWS, {"counts": pack([0, 0, 0])}, "a row without an entry"),
        # The sum of these is 0, and each of them less one is no negative int32
        (LogprobRows, THREE_ROWS, {"counts": pack([-(2**31), 2**31 - 1, 1])}, "negative"),
    ],
)
def test_contradicting_message_is_refused(rows: Any, message: Any, change: dict[str, object], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        rows.from_message(msgspec.structs.replace(message, **change))


def test_drafts_must_fit_into_a_row_that_samples() -> None:
    plan = msgspec.structs.replace(PLAN, counts=pack([5, 4]), drafts=pack([0, 3]))
    assert StepRows.from_message(plan).rows.drafts.tolist() == [0, 3]
    for drafts in ([0, 4], [0, -1], [1, 0], [0]):
        with pytest.raises(ProtocolError):
            StepRows.from_message(msgspec.structs.replace(plan, drafts=pack(drafts)))


def test_masks_must_match_the_counts_of_their_rows() -> None:
    grammar = GrammarOutput(1, 2, pack([4, 0]), memoryview(pack([7, 8, 9])), pack([2, 1]))
    rows = GrammarRows.from_message(grammar, 32)
    assert [column.tolist() for column in rows] == [[4, 0], [2, 1], [[7], [8], [9]]]
    alike = msgspec.structs.replace(grammar, counts=b"", bitmask=memoryview(pack([7, 8])))
    assert GrammarRows.from_message(alike, 32).counts.tolist() == [1, 1]
    for counts in ([2, 2], [3, 0], [4, -1], [3]):
        with pytest.raises(ProtocolError):
            GrammarRows.from_message(msgspec.structs.replace(grammar, counts=pack(counts)), 32)
    wide = msgspec.structs.replace(grammar, bitmask=memoryview(bytes(24)))
    assert GrammarRows.from_message(wide, 33).masks.shape == (3, 2)
    three = msgspec.structs.replace(grammar, slots=pack([4, 0, 1]), counts=pack([-(2**31), 2**31 - 1, 4]))
    for message, vocab_size in ((three, 32), (grammar, 33)):
        with pytest.raises(ProtocolError):
            GrammarRows.from_message(message, vocab_size)
