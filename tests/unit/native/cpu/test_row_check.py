"""The compiled check of a plan's rows refuses and counts what the plain one does."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from services.worker.batch.row_check import EMPTY, count_rows
from services.worker.kernels.cpu.rows import CpuRows

SLOTS, BLOCK, CONTEXT = 12, 4, 30
Columns = dict[str, NDArray[Any]]


def batch(random: np.random.Generator) -> Columns:
    """A batch in the middle of its requests, some of which have unsettled drafts."""
    known = random.integers(2, CONTEXT - 6, SLOTS)
    unsettled = random.integers(0, 3, SLOTS) * random.integers(0, 2, SLOTS)
    computed = np.where(random.random(SLOTS) < 0.2, EMPTY, known - 1)
    columns = {
        "generation": random.integers(1, 4, SLOTS), "num_blocks": np.full(SLOTS, -(-CONTEXT // BLOCK)),
        "num_tokens": known, "computed": computed, "unsettled": np.where(computed == EMPTY, 0, unsettled),
    }  # fmt: skip
    return {name: column.astype(np.int32) for name, column in columns.items()}


def rows_of(columns: Columns, random: np.random.Generator) -> Columns:
    """Decoding rows of some slots, with drafts, of which some that were launched before were rejected."""
    slots = random.permutation(SLOTS)[: random.integers(0, SLOTS)]
    drafts = random.integers(0, 3, len(slots))
    back = random.integers(0, columns["unsettled"][slots] + 1)
    starts = columns["num_tokens"][slots] - 1 - back
    rows = {
        "slots": slots, "generations": columns["generation"][slots], "starts": starts, "counts": drafts + 1,
        "samples": np.ones(len(slots), np.bool_), "drafts": drafts,
    }  # fmt: skip
    return {name: column if name == "samples" else column.astype(np.int32) for name, column in rows.items()}


WRONG = {
    "generations": 1, "starts": -1, "counts": 1, "drafts": -1, "slots": SLOTS, "num_blocks": -5, "num_tokens": 1,
}  # fmt: skip
"""Column -> what is added to one of its numbers."""


@pytest.mark.parametrize("wrong", [None, "samples", "twice", *WRONG])
def test_both_forms_agree(wrong: str | None) -> None:
    compiled, refused = CpuRows().count_rows, 0
    for seed in range(40):
        random = np.random.default_rng(seed)
        columns = batch(random)
        rows = rows_of(columns, random)
        if number := len(rows["slots"]):
            at = random.integers(number)
            if wrong == "samples":
                rows["samples"][at] = False
            elif wrong == "twice":
                rows = {name: np.append(column, column[at]) for name, column in rows.items()}
            elif wrong in rows:
                rows[wrong][at] += WRONG[wrong]
            elif wrong is not None:
                columns[wrong][rows["slots"][at]] += WRONG[wrong]
        for column in rows.values():
            column.flags.writeable = False  # as the views of a message
        answers, after = [], []
        for function in (count_rows, compiled):
            mine = {name: column.copy() for name, column in columns.items()}
            others = np.zeros(SLOTS, np.intp), BLOCK, CONTEXT
            answers.append(function(*rows.values(), *mine.values(), *others))
            after.append(mine)
        assert answers[0] == answers[1]
        refused += not answers[0]
        for name in columns:
            assert np.array_equal(after[0][name], after[1][name]), name
        if answers[0] and number:
            assert (after[0]["computed"][rows["slots"]] == rows["starts"] + rows["counts"]).all()
    assert (refused == 0) == (wrong is None)
