"""Rows of a step under Triton's interpreter against the reference, with tiles of the same size."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.kernels.cuda.graph_plan import MOST_PADDING
from services.worker.kernels.cuda.rows import MOST_APART
from services.worker.kernels.interface.rows import RowKernels
from tests.unit.native.cuda.kernel_cases import KernelMaker
from tests.unit.native.row_cases import POISON, SLOTS, VOCAB, RowCases, empty_batch

CASES = RowCases(200, (1, 1, 63, 64, 65, 150))
LIMIT, TOKENS = CASES.limit, 2000


def both(make: KernelMaker) -> tuple[Any, RowKernels]:
    ours, theirs = make().rows, RowKernels()
    theirs.tile = ours.tile
    return ours, theirs


@pytest.mark.parametrize("kind", ["decodes", "drafts", "chunks"])
@pytest.mark.parametrize("seed", range(8))
def test_layouts_are_equal_and_padding_rows_follow(make: KernelMaker, seed: int, kind: str) -> None:
    """Also of no rows, and with the ids of another stage. In a small step of decode rows each draft is a tile."""
    rng = np.random.default_rng(seed)
    rows, tokens = CASES.rows(rng), CASES.history(rng)
    ours, theirs = both(make)
    if kind != "chunks":
        drafts = np.where(rows.samples, 3 if kind == "drafts" else 0, 0).astype(np.int32)
        rows = replace(rows, counts=drafts + 1, drafts=drafts)
        theirs.tile = 1 if rows.counts.sum() <= MOST_APART else ours.tile
    for known in (tokens, None):
        batches = empty_batch(TOKENS), empty_batch(TOKENS)
        counts = [k.lay_out(rows, known, VOCAB, b) for k, b in zip((ours, theirs), batches, strict=True)]
        assert counts[0] == counts[1]
        total, (tiles, sampled) = int(rows.counts.sum()), counts[0]
        for name, size in (("ids", total), ("slots", total), ("positions", total), ("sampled", sampled)):
            assert torch.equal(*(getattr(b, name)[:size] for b in batches)), name
        assert torch.equal(batches[0].tiles[:tiles], batches[1].tiles[:tiles])
        batch, padded = batches[0], total + MOST_PADDING
        assert (batch.slots[total:padded] == -1).all()
        assert (batch.slots[padded:] == POISON).all()
        assert (batch.tiles[tiles : tiles + MOST_PADDING, 3] == 0).all()
        assert (batch.sampled[sampled : sampled + MOST_PADDING] == 0).all()


def test_tokens_are_written_and_read(make: KernelMaker) -> None:
    """Positions beyond the context are skipped."""
    ours, tokens = make().rows, torch.zeros(SLOTS, LIMIT, dtype=torch.int32)
    ours.write_prompt(tokens, 3, np.array([5, 6, 7], np.int32))
    slots, positions = np.array([3, 1, 3], np.int32), np.array([3, LIMIT, 0], np.int32)
    ours.write_tokens(tokens, slots, positions, torch.tensor([8, 9, 4], dtype=torch.int32))
    assert tokens[3, :5].tolist() == [4, 6, 7, 8, 0]
    assert int(tokens.sum()) == 4 + 6 + 7 + 8
    read = ours.read_tokens(tokens, slots[[0, 2]], positions[[0, 2]])
    assert (read.tolist(), read.dtype) == ([8, 4], torch.int32)
    ours.write_tokens(tokens, slots[1:2], positions[1:2], torch.tensor([9], dtype=torch.int32))
    assert int(tokens.sum()) == 4 + 6 + 7 + 8


@pytest.mark.parametrize("seed", range(8))
def test_settled_and_verified_rows_are_equal(make: KernelMaker, seed: int) -> None:
    ours, theirs = (CASES.settled(each, seed, is_early=seed == 5) for each in both(make))
    assert ours == theirs
    verified, expected = (CASES.verified(each, seed) for each in both(make))
    assert verified == expected
