"""Acceptance, device positions and the sampler with drafts: distribution, rules and what is refused."""

import numpy as np
import pytest
import torch

from protocol.steps import NO_DRAFT
from services.worker.backends.native.draft_table import DraftTable
from services.worker.backends.native.sampling.acceptance import SamplePositions
from services.worker.backends.native.sampling.sampler import Sampler
from services.worker.backends.native.token_history import TokenHistory
from services.worker.batch.slots import PlanError, Rows, SlotTable
from services.worker.distributed.outcome import Outcome
from tests.unit.native.implementations import every_implementation, make

LIMIT, VOCAB = 32, 8


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@every_implementation
def test_accepts_up_to_the_first_that_differs(implementation: str) -> None:
    """Row width (docs/invariants.md), against one row at a time; also where fewer may be accepted than there are."""
    rng, kernels = np.random.default_rng(0), make(implementation)
    for _ in range(200):
        rows = int(rng.integers(1, 6))
        drafts, firsts = rng.integers(0, 5, rows, np.int32), rng.integers(1, LIMIT - 5, rows, np.int32)
        acceptable = np.minimum(drafts, rng.integers(0, 6, rows, np.int32))
        history = TokenHistory(rows, LIMIT, VOCAB, kernels)
        history.tokens.random_(0, 2)
        positions = SamplePositions.from_rows(np.arange(rows, dtype=np.int32), firsts, drafts)
        ids = rng.integers(0, 2, len(positions.slots), np.int32)
        accepted = positions.accept(kernels.rows, torch.from_numpy(ids), history.tokens, acceptable)
        at, tokens = 0, []
        for row in range(rows):
            drawn = ids[at : at + drafts[row] + 1]
            count = 1
            while count <= acceptable[row] and history.tokens[row, firsts[row] + count - 1] == drawn[count - 1]:
                count += 1
            assert accepted.counts[row] == count
            tokens += drawn[:count].tolist()
            at += len(drawn)
        assert ids[accepted.stays].tolist() == tokens
        assert accepted.drafted.tolist() == acceptable.tolist()


@every_implementation
def test_a_token_beyond_the_context_equals_no_draft(implementation: str) -> None:
    whole = make(implementation)
    kernels, history = whole.rows, TokenHistory(1, LIMIT, VOCAB, whole)
    history.tokens.fill_(3)
    positions = SamplePositions.from_rows(i32(0), i32(LIMIT - 1), i32(1))
    ids = torch.tensor([3, 3], dtype=torch.int32)
    assert positions.accept(kernels, ids, history.tokens, i32(1)).counts.tolist() == [2]


@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "temperature": 0.7}, {"top_p": 0.8}])
def test_drafts_keep_the_distribution(filters: dict[str, float]) -> None:
    """Chi-square of the first and the second token over many seeds, whatever was drafted (same tokens)."""
    rows, rng = 6000, np.random.default_rng(5)
    first, second = (rng.normal(0, 1, VOCAB).astype(np.float32) for _ in range(2))
    table = SlotTable(rows, 16, 1, LIMIT)
    table.temperature[:] = 1.0
    table.seed[:] = rng.integers(0, 2**63, rows)
    for name, value in filters.items():
        getattr(table, name)[:] = value
    kernels = make("compiled")
    history = TokenHistory(rows, LIMIT, VOCAB, kernels)
    draft = int(first.argmax())
    history.tokens[:, 9] = draft
    logits = torch.from_numpy(np.tile(np.stack([first, second]), (rows, 1)))
    sampler = Sampler(table, history, VOCAB, kernels)
    slots, firsts, drafts = (np.arange(rows, dtype=np.int32), np.full(rows, 9, np.int32), np.ones(rows, np.int32))
    result = sampler.sample(logits, slots, firsts, drafts=drafts)
    ends = np.cumsum(result.counts)
    heads, both = result.ids.numpy()[ends - result.counts], result.counts == 2
    assert ((heads == draft) == both).all()
    for tokens, row in ((heads, first), (result.ids.numpy()[ends - 1][both], second)):
        scaled = row / filters.get("temperature", 1.0)
        chances = np.exp(scaled - scaled.max())
        if "top_k" in filters:
            chances[np.argsort(-scaled)[filters["top_k"] :]] = 0
        chances /= chances.sum()
        if "top_p" in filters:
            order = np.argsort(-chances)
            chances[order[1:][np.cumsum(chances[order])[:-1] >= filters["top_p"]]] = 0
            chances /= chances.sum()
        seen, left = np.bincount(tokens, minlength=VOCAB), chances > 0
        assert not seen[~left].any()
        statistic = ((seen - len(tokens) * chances)[left] ** 2 / (len(tokens) * chances)[left]).sum()
        assert statistic < 24.3, "chance of one in a thousand at 7 degrees of freedom"


NOT_MASKED = np.empty(0, np.int32)


def rows(slot: int, start: int, count: int, drafts: int = 0, samples: bool = True) -> Rows:
    return Rows(i32(slot), i32(1), i32(start), i32(count), np.array([samples]), i32(drafts))


@every_implementation
def test_rows_are_brought_to_their_true_positions(implementation: str) -> None:
    """Once, at any depth; fewer drafts make a shorter row, and unused ones are gone (position bound, latest drafts)."""
    kernels = make(implementation)
    history, drafts = TokenHistory(4, LIMIT, VOCAB, kernels), DraftTable(4, 3, VOCAB, kernels.rows)
    drafts.assign(2)
    assert drafts.settle(rows(2, 0, 6), history, NOT_MASKED).ends.tolist() == [6]
    drafts.advance(i32(2), i32(6), i32(1))
    drafts.propose(i32(2), np.array([[5, 6, NO_DRAFT]], np.int32))
    settled = drafts.settle(rows(2, 6, 4, 3), history, NOT_MASKED)
    assert (settled.starts.tolist(), settled.counts.tolist(), settled.drafts.tolist()) == ([6], [3], [2])
    assert history.tokens[2, 7:9].tolist() == [5, 6]
    drafts.advance(i32(2), i32(7), i32(2))  # one was accepted
    drafts.propose(i32(2), np.array([[1, 2, 3]], np.int32))
    settled = drafts.settle(rows(2, 10, 1), history, NOT_MASKED)  # planned when nothing of that was known
    assert (settled.starts.tolist(), settled.counts.tolist()) == ([8], [1])
    assert drafts.settle(rows(2, 11, 4, 3), history, NOT_MASKED).drafts.tolist() == [0]
    with pytest.raises(PlanError, match="slot 2: planned from 3 on, but it is at 10"):
        drafts.settle(rows(2, 3, 1), history, NOT_MASKED)
    drafts.assign(2)
    assert drafts.settle(rows(2, 0, 3), history, NOT_MASKED).ends.tolist() == [3]


@every_implementation
@pytest.mark.parametrize("most", [0, 3], ids=["without drafts", "with drafts"])
def test_a_row_behind_a_left_out_one_begins_with_the_last_known_token(implementation: str, most: int) -> None:
    """As often as rows are left out; its drafts are gone. Other rows begin where they were planned."""
    kernels = make(implementation)
    history, drafts = TokenHistory(4, LIMIT, VOCAB, kernels), DraftTable(4, most, VOCAB, kernels.rows)
    drafts.assign(2)
    assert drafts.settle(rows(2, 0, 6), history, i32(2)).starts.tolist() == [0]
    drafts.advance(i32(2), i32(6), i32(0))
    for planned in (6, 7):
        settled = drafts.settle(rows(2, planned, 1 + most, most), history, i32(2))
        assert (settled.starts.tolist(), settled.counts.tolist(), settled.drafts.tolist()) == ([5], [1], [0])
        drafts.advance(i32(2), i32(6), i32(0))
    assert drafts.settle(rows(2, 5, 1), history, i32(2)).starts.tolist() == [5]
    drafts.advance(i32(2), i32(6), i32(1))
    assert drafts.settle(rows(2, 6, 1), history, i32(2)).starts.tolist() == [6]
    with pytest.raises(PlanError, match="slot 2: planned from 5 on, but it is at 7"):
        drafts.settle(rows(2, 5, 1), history, i32(2))
    both = Rows(i32(2, 3), i32(1, 1), i32(8, 4), i32(1, 2), np.array([True, False]), i32(0, 0))
    assert drafts.settle(both, history, i32(2)).starts.tolist() == [7, 4]


@pytest.mark.parametrize("bad", [[[VOCAB]], [[-2]], [[0, 0, 0, 0]]])
def test_what_is_no_draft_reaches_no_slot(bad: list[list[int]]) -> None:
    """Valid ids (docs/invariants.md)."""
    with pytest.raises(RuntimeError, match="or not of the vocabulary"):
        DraftTable(4, 3, VOCAB, make("reference").rows).propose(i32(1), np.array(bad, np.int32))


def test_other_ranks_get_the_outcome() -> None:
    ids = torch.tensor([4, 5, 6, 7, 0, 1], dtype=torch.int32)
    sent = Outcome(ids, i32(2, 1, 3), np.array([[1, NO_DRAFT], [2, 3], [NO_DRAFT] * 2], np.int32))
    zeros = i32(0, 0, 0)
    rows = Rows(zeros, zeros, zeros, i32(4, 1, 4), zeros == 0, i32(3, 0, 2))
    got = Outcome.from_message(sent.to_message(Outcome.empty_message(rows, 2)), 2)
    assert torch.equal(got.ids, ids)
    assert got.counts.tolist() == [2, 1, 3]
    assert got.drafts.tolist() == sent.drafts.tolist()
    of_others = got.select(np.array([False, True, True]))
    assert (of_others.ids.tolist(), of_others.counts.tolist()) == ([6, 7, 0, 1], [1, 3])
    assert of_others.drafts.tolist() == sent.drafts[1:].tolist()
