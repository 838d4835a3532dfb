"""Columns of a message as arrays. Columns that contradict one another are refused."""

import msgspec
import numpy as np
import pytest

from protocol.codec import ProtocolError, pack
from protocol.requests import RequestOutputs
from protocol.rows import GrammarRows, OutputRows, ResultRows, StepRows
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
RESULT = ModelRunnerOutput(1, 1, pack([4, 0]), pack([1, 9]), pack([2, 0]), pack([11, 12]))
OUTPUTS = RequestOutputs(pack(np.array([2**32 - 1, 3], np.uint32)), pack([0, 5]), pack([11, 12]))


def test_rows_of_a_plan() -> None:
    rows = StepRows.from_message(PLAN)
    assert [column.tolist() for column in rows] == [
        [4, 0], [1, 9], [0, 12], [5, 1], [False, True], [0, 0], [4, 4, 0], [7, 8, 3], [2], [],
    ]  # fmt: skip
    assert not any(column.flags.writeable for column in rows)


def test_rows_of_a_result() -> None:
    rows = ResultRows.from_message(RESULT)
    assert [column.tolist() for column in rows] == [[4, 0], [1, 9], [2, 0], [11, 12], [0, 0]]


def test_rows_of_outputs() -> None:
    rows = OutputRows.from_message(OUTPUTS)
    assert [column.tolist() for column in rows] == [[2**32 - 1, 3], [0, 5], [11, 12]]


def test_message_without_rows() -> None:
    assert not len(StepRows.from_message(SchedulerOutput(1, 1, b"", b"", b"", b"", b"")).slots)
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
    ("change", "text"),
    [
        ({"counts": pack([5, 0])}, "a row without a token"),
        ({"samples": b"\0\2"}, "samples"),
        ({"samples": b"\xff\1"}, "samples"),
    ],
)
def test_contradicting_plan_is_refused(change: dict[str, bytes], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        StepRows.from_message(msgspec.structs.replace(PLAN, **change))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"slots": pack([4])}, "differ in length"),
        ({"generations": pack([1, 9, 9])}, "differ in length"),
        ({"counts": pack([2])}, "differ in length"),
        ({"counts": pack([1, 0])}, "2 tokens, but its rows count 1"),
        ({"token_ids": pack([11])}, "1 tokens, but its rows count 2"),
        # The sum of these two is -2 in int32.
        ({"counts": pack([2**31 - 1, 2**31 - 1])}, "rows count 4294967294"),
        ({"counts": pack([3, -1])}, "negative"),
        ({"slots": pack([4, -1])}, "negative"),
        ({"token_ids": pack([11, -12])}, "negative"),
        ({"token_ids": b"\0"}, "does not hold int32"),
    ],
)
def test_contradicting_result_is_refused(change: dict[str, bytes], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        ResultRows.from_message(msgspec.structs.replace(RESULT, **change))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"numbers": b""}, "differ in length"),
        ({"indices": pack([0])}, "differ in length"),
        ({"indices": pack([0, -1])}, "negative"),
        ({"token_ids": pack([-1, 0])}, "negative"),
        ({"numbers": b"\0\0"}, "does not hold uint32"),
    ],
)
def test_contradicting_outputs_are_refused(change: dict[str, bytes], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        OutputRows.from_message(msgspec.structs.replace(OUTPUTS, **change))


def test_drafts_must_fit_into_a_row_that_samples() -> None:
    plan = msgspec.structs.replace(PLAN, counts=pack([5, 4]), drafts=pack([0, 3]))
    assert StepRows.from_message(plan).drafts.tolist() == [0, 3]
    for drafts in ([0, 4], [0, -1], [1, 0], [0]):
        with pytest.raises(ProtocolError):
            StepRows.from_message(msgspec.structs.replace(plan, drafts=pack(drafts)))


def test_drafted_must_have_a_count_per_row() -> None:
    assert ResultRows.from_message(msgspec.structs.replace(RESULT, drafted=pack([3, 0]))).drafted.tolist() == [3, 0]
    for drafted in ([3], [-1, 0]):
        with pytest.raises(ProtocolError):
            ResultRows.from_message(msgspec.structs.replace(RESULT, drafted=pack(drafted)))


def test_masks_must_match_the_counts_of_their_rows() -> None:
    grammar = GrammarOutput(1, 2, pack([4, 0]), memoryview(pack([7, 8, 9])), pack([2, 1]))
    rows = GrammarRows.from_message(grammar, 32)
    assert [column.tolist() for column in rows] == [[4, 0], [2, 1], [[7], [8], [9]]]
    alike = msgspec.structs.replace(grammar, counts=b"", bitmask=memoryview(pack([7, 8])))
    assert GrammarRows.from_message(alike, 32).counts.tolist() == [1, 1]
    for counts in ([2, 2], [3, 0], [4, -1], [3]):
        with pytest.raises(ProtocolError):
            GrammarRows.from_message(msgspec.structs.replace(grammar, counts=pack(counts)), 32)
    with pytest.raises(ProtocolError):
        GrammarRows.from_message(grammar, 33)
