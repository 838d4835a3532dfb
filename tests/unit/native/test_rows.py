"""Rows of a step: compiled functions against the reference, over random batches, and single cases by hand."""

import numpy as np
import pytest
import torch

from services.worker.batch.slots import EMPTY, Rows
from services.worker.kernels.interface.rows import BatchTensors, SlotDrafts
from tests.unit.native.implementations import IMPLEMENTATIONS, every_implementation, make

SLOTS, LIMIT, VOCAB, MOST = 12, 60, 50, 4


def random_rows(rng: np.random.Generator) -> Rows:
    """Some slots, each with one position, a chunk, or drafts."""
    number = int(rng.integers(0, SLOTS + 1))
    slots = rng.permutation(SLOTS)[:number].astype(np.int32)
    samples = rng.random(number) < 0.7
    drafts = np.where(samples, rng.integers(0, MOST + 1, number), 0).astype(np.int32)
    counts = (rng.choice([1, 1, 7, 8, 9, 24], number) + drafts).astype(np.int32)
    starts = rng.integers(0, LIMIT - 28, number).astype(np.int32)
    return Rows(slots, slots, starts, counts, samples, drafts)


def history(rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, VOCAB, (SLOTS, LIMIT)).astype(np.int32))


def empty_batch(tokens: int = 400) -> BatchTensors:
    ints = [torch.full((tokens,), -7, dtype=torch.int32) for _ in range(4)]
    return BatchTensors(*ints[:3], torch.full((tokens, 4), -7, dtype=torch.int32), ints[3])


@pytest.mark.parametrize("seed", range(30))
def test_layouts_are_equal(seed: int) -> None:
    """Also of no rows, and with the ids of another stage."""
    rng = np.random.default_rng(seed)
    rows, tokens = random_rows(rng), history(rng)
    for known in (tokens, None):
        batches = []
        for implementation in IMPLEMENTATIONS:
            batch = empty_batch()
            counts = make(implementation).rows.lay_out(rows, known, VOCAB, batch)
            batches.append((counts, [tensor.tolist() for tensor in batch]))
        assert batches[0] == batches[1]


@every_implementation
def test_layout_of_a_chunk_and_a_row_with_drafts(implementation: str) -> None:
    kernels, batch = make(implementation).rows, empty_batch()
    slots, starts, counts = (np.array(c, np.int32) for c in ([4, 2], [3, 10], [kernels.tile + 1, 3]))
    rows = Rows(slots, slots, starts, counts, np.array([False, True]), np.array([0, 2], np.int32))
    tokens = torch.arange(SLOTS * LIMIT, dtype=torch.int32).view(SLOTS, LIMIT)
    tiles, sampled = kernels.lay_out(rows, tokens, SLOTS * LIMIT, batch)
    total = kernels.tile + 4
    assert batch.slots[:total].tolist() == [4] * (kernels.tile + 1) + [2] * 3
    assert batch.positions[:total].tolist() == [*range(3, kernels.tile + 4), 10, 11, 12]
    assert batch.ids[:total].tolist() == [
        LIMIT * slot + position for slot, position in zip(batch.slots[:total], batch.positions[:total], strict=True)
    ]  # fmt: skip
    assert batch.tiles[:tiles].tolist() == [
        [4, 3, 0, kernels.tile],
        [4, 3 + kernels.tile, kernels.tile, 1],
        [2, 10, kernels.tile + 1, 3],
    ]
    assert batch.sampled[:sampled].tolist() == [kernels.tile + 1, kernels.tile + 2, kernels.tile + 3]


@every_implementation
@pytest.mark.parametrize("bad", [-1, VOCAB])
def test_a_position_without_a_token_is_refused(implementation: str, bad: int) -> None:
    """Valid ids (docs/invariants.md)."""
    rng = np.random.default_rng(0)
    tokens, one = history(rng), np.array([5], np.int32)
    tokens[5, 9] = bad
    rows = Rows(one, one, np.array([7], np.int32), one, np.array([True]), one * 0)
    with pytest.raises(RuntimeError, match="slot 5 is computed at position 9, which has no token"):
        make(implementation).rows.lay_out(rows, tokens, VOCAB, empty_batch())


@pytest.mark.parametrize("seed", range(30))
def test_settled_rows_are_equal(seed: int) -> None:
    """Frontiers before the planned start, missing drafts, rows at the end of the context; one case has a row that is
    planned before its frontier."""
    rng = np.random.default_rng(seed)
    rows, tokens = random_rows(rng), history(rng)
    rows.starts[:] += rng.integers(0, 2, len(rows.slots)) * (LIMIT - rows.ends)
    frontier = np.full(SLOTS, EMPTY)
    frontier[rows.slots] = np.where(rng.random(len(rows.slots)) < 0.3, EMPTY, rows.starts - rows.drafts)
    if seed % 5 == 0 and len(rows.slots):
        frontier[rows.slots[-1]] = rows.starts[-1] + 1
    results = []
    for implementation in IMPLEMENTATIONS:
        drafts = SlotDrafts(
            torch.from_numpy(frontier.astype(np.int32)),
            torch.from_numpy(np.random.default_rng(seed).integers(0, MOST + 1, SLOTS).astype(np.int32)),
            torch.from_numpy(np.random.default_rng(seed).integers(0, VOCAB, (SLOTS, MOST)).astype(np.int32)),
        )
        own = tokens.clone()
        settled, bad = make(implementation).rows.settle(rows, drafts, own)
        columns = None if settled is None else [column.tolist() for column in settled]
        results.append((columns, bad, own.tolist(), [tensor.tolist() for tensor in drafts]))
    assert results[0] == results[1]
    if seed % 5 == 0 and len(rows.slots):
        assert results[0][1] >= 0


@pytest.mark.parametrize("seed", range(30))
def test_verified_drafts_are_equal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    number = int(rng.integers(1, SLOTS + 1))
    slots = rng.permutation(SLOTS)[:number].astype(np.int32)
    drafts = rng.integers(0, MOST + 1, number).astype(np.int32)
    acceptable = np.minimum(drafts, rng.integers(0, MOST + 2, number)).astype(np.int32)
    firsts = rng.integers(1, LIMIT, number).astype(np.int32)
    ids = torch.from_numpy(rng.integers(0, 2, int((drafts + 1).sum())).astype(np.int32))
    tokens = history(rng) % 2
    verified = [
        make(implementation).rows.verify(slots, firsts, drafts, acceptable, ids, tokens)
        for implementation in IMPLEMENTATIONS
    ]
    for ours, theirs in zip(*verified, strict=True):
        assert ours.tolist() == theirs.tolist()


@every_implementation
def test_spread(implementation: str) -> None:
    owners, offsets = make(implementation).rows.spread(np.array([2, 0, 3, 1], np.int32))
    assert (owners.tolist(), offsets.tolist()) == ([0, 0, 2, 2, 2, 3], [0, 1, 0, 1, 2, 0])
    assert len(make(implementation).rows.spread(np.empty(0, np.int32))[0]) == 0


@every_implementation
def test_tokens_beyond_the_history_are_not_written(implementation: str) -> None:
    tokens = torch.zeros(2, 4, dtype=torch.int32)
    columns = (np.array(column, np.int32) for column in ([1, 0, 1], [3, 4, 0]))
    make(implementation).rows.write_tokens(tokens, *columns, torch.tensor([7, 8, 9], dtype=torch.int32))
    assert tokens.tolist() == [[0, 0, 0, 0], [9, 0, 0, 7]]


@pytest.mark.parametrize("seed", range(30))
def test_masks_are_placed_equally(seed: int) -> None:
    """Some slots have no sampling row, some rows too few or too many masks for their drafts."""
    rng = np.random.default_rng(seed)
    rows = random_rows(rng)
    masked = rng.permutation(SLOTS + 3)[: rng.integers(0, SLOTS + 3)].astype(np.int32)
    counts = rng.integers(1, MOST + 2, len(masked)).astype(np.int32)
    placed = [
        make(implementation).rows.place_masks(rows.slots, rows.drafts, masked, counts)
        for implementation in IMPLEMENTATIONS
    ]
    assert [column.tolist() for column in placed[0]] == [column.tolist() for column in placed[1]]


@every_implementation
def test_masks_of_a_row_are_for_its_drafts_in_order(implementation: str) -> None:
    slots, drafts, masked, counts = (
        np.array(column, np.int32) for column in ([4, 2, 7], [2, 0, 3], [7, 5, 2, 4], [2, 2, 3, 3])
    )
    tokens, acceptable = make(implementation).rows.place_masks(slots, drafts, masked, counts)
    assert tokens.tolist() == [4, 5, -1, -1, 3, -1, -1, 0, 1, 2]
    assert acceptable.tolist() == [2, 0, 1]
