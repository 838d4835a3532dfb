"""A slot whose row was left out: its next row is planned one position lower, and nowhere else."""

import pytest

from protocol.codec import pack
from protocol.sampling import SamplingParams
from protocol.steps import NewRequest, SchedulerOutput
from services.worker.batch.slots import PlanError, SlotTable

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def plan(start: int, count: int = 1, drafts: int = 0, new: bool = False) -> SchedulerOutput:
    """Return a plan with one row of slot 0, which samples with masks."""
    request = NewRequest(0, 1, pack([3] * 6), 6, pack([0, 1, 2, 3]), GREEDY)
    return SchedulerOutput(
        1, 1, pack([0]), pack([1]), pack([start]), pack([count]), b"\1", [request] if new else [],
        drafts=pack([drafts]) if drafts else b"", masked=pack([0]),
    )  # fmt: skip


def launched(leaves_rows_out: bool = True) -> SlotTable:
    """Return a table whose slot 0 has three rows in flight: a prompt of 6 tokens, and two tokens behind it."""
    table = SlotTable(2, 4, 8, 16, leaves_rows_out=leaves_rows_out)
    for step in (plan(0, 6, new=True), plan(6), plan(7)):
        table.apply(step)
    return table


@pytest.mark.parametrize("start", [8, 7, 6, 5])
def test_the_next_row_is_planned_lower_by_the_rows_that_were_left_out(start: int) -> None:
    """None of the three rows may have been left out, or all of them."""
    table = launched()
    table.apply(plan(start))
    assert (table.computed[0], table.num_tokens[0]) == (start + 1, start + 2)
    table.apply(plan(start + 1))


@pytest.mark.parametrize("start", [4, 9])
def test_other_positions_are_refused(start: int) -> None:
    with pytest.raises(PlanError):
        launched().apply(plan(start))


def test_drafts_of_a_left_out_row_are_taken_back() -> None:
    table = launched()
    table.apply(plan(8, 4, drafts=3))
    assert table.apply(plan(8)).starts.tolist() == [8]
    assert (table.computed[0], table.num_tokens[0]) == (9, 10)


def test_a_runner_that_leaves_no_row_out_refuses_lower_positions() -> None:
    with pytest.raises(PlanError):
        launched(leaves_rows_out=False).apply(plan(7))
