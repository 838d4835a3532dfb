"""Rows of a step: compiled functions against the reference, over random batches, and single cases by hand."""

import numpy as np
import pytest
import torch

from services.worker.batch.masks import place_masks
from services.worker.batch.slots import Rows, spread
from tests.unit.native.implementations import IMPLEMENTATIONS, every_implementation, make
from tests.unit.native.row_cases import SLOTS, VOCAB, RowCases, empty_batch

CASES = RowCases(60, (1, 1, 7, 8, 9, 24))
LIMIT, TOKENS = CASES.limit, 400


@pytest.mark.parametrize("seed", range(30))
def test_layouts_are_equal(seed: int) -> None:
    """Also of no rows, and with the ids of another stage."""
    rng = np.random.default_rng(seed)
    rows, tokens = CASES.rows(rng), CASES.history(rng)
    for known in (tokens, None):
        batches = []
        for implementation in IMPLEMENTATIONS:
            batch = empty_batch(TOKENS)
            counts = make(implementation).rows.lay_out(rows, known, VOCAB, batch)
            batches.append((counts, [tensor.tolist() for tensor in batch]))
        assert batches[0] == batches[1]


@every_implementation
def test_layout_of_a_chunk_and_a_row_with_drafts(implementation: str) -> None:
    kernels, batch = make(implementation).rows, empty_batch(TOKENS)
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
    tokens, one = CASES.history(rng), np.array([5], np.int32)
    tokens[5, 9] = bad
    rows = Rows(one, one, np.array([7], np.int32), one, np.array([True]), one * 0)
    with pytest.raises(RuntimeError, match="slot 5 is computed at position 9, which has no token"):
        make(implementation).rows.lay_out(rows, tokens, VOCAB, empty_batch(TOKENS))


@pytest.mark.parametrize("seed", range(30))
def test_settled_and_verified_rows_are_equal(seed: int) -> None:
    kernels = [make(implementation).rows for implementation in IMPLEMENTATIONS]
    ours, theirs = (CASES.settled(each, seed, is_early=seed % 5 == 0) for each in kernels)
    assert ours == theirs
    verified, expected = (CASES.verified(each, seed) for each in kernels)
    assert verified == expected


def test_spread() -> None:
    owners, offsets = spread(np.array([2, 0, 3, 1], np.int32))
    assert (owners.tolist(), offsets.tolist()) == ([0, 0, 2, 2, 2, 3], [0, 1, 0, 1, 2, 0])
    assert len(spread(np.empty(0, np.int32))[0]) == 0


@every_implementation
def test_tokens_beyond_the_history_are_not_written(implementation: str) -> None:
    tokens = torch.zeros(2, 4, dtype=torch.int32)
    columns = (np.array(column, np.int32) for column in ([1, 0, 1], [3, 4, 0]))
    make(implementation).rows.write_tokens(tokens, *columns, torch.tensor([7, 8, 9], dtype=torch.int32))
    assert tokens.tolist() == [[0, 0, 0, 0], [9, 0, 0, 7]]


def test_masks_of_a_row_are_for_its_drafts_in_order() -> None:
    slots, drafts, masked, counts = (
        np.array(column, np.int32) for column in ([4, 2, 7], [2, 0, 3], [7, 5, 2, 4], [2, 2, 3, 3])
    )
    tokens, acceptable = place_masks(slots, drafts, masked, counts)
    assert tokens.tolist() == [4, 5, -1, -1, 3, -1, -1, 0, 1, 2]
    assert acceptable.tolist() == [2, 0, 1]
