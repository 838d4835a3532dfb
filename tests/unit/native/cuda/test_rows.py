"""Rows of a step under Triton's interpreter against the reference, with tiles of the same size."""

from typing import Any

import numpy as np
import pytest
import torch

from services.worker.batch.slots import EMPTY, Rows
from services.worker.kernels.cuda.graph_plan import MOST_PADDING
from services.worker.kernels.interface.rows import BatchTensors, RowKernels, SlotDrafts
from tests.unit.native.cuda.kernel_cases import KernelMaker

SLOTS, LIMIT, VOCAB, MOST = 12, 200, 50, 4
POISON = -7
TOKENS = 2000


def both(make: KernelMaker) -> tuple[Any, RowKernels]:
    ours, theirs = make().rows, RowKernels()
    theirs.tile = ours.tile
    return ours, theirs


def random_rows(rng: np.random.Generator, decodes: bool) -> Rows:
    """Some slots, each with one position, a chunk, or drafts."""
    number = int(rng.integers(0, SLOTS + 1))
    slots = rng.permutation(SLOTS)[:number].astype(np.int32)
    samples = rng.random(number) < 0.7
    drafts = np.where(samples, rng.integers(0, MOST + 1, number), 0).astype(np.int32)
    counts = (rng.choice([1, 1, 63, 64, 65, 150], number) + drafts).astype(np.int32)
    if decodes:
        drafts, counts = drafts * 0, counts * 0 + 1
    starts = rng.integers(0, LIMIT - 155, number).astype(np.int32)
    return Rows(slots, slots, starts, counts, samples, drafts)


def history(rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, VOCAB, (SLOTS, LIMIT)).astype(np.int32))


def empty_batch() -> BatchTensors:
    ints = [torch.full((TOKENS,), POISON, dtype=torch.int32) for _ in range(4)]
    return BatchTensors(*ints[:3], torch.full((TOKENS, 4), POISON, dtype=torch.int32), ints[3])


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_layouts_are_equal_and_padding_rows_follow(make: KernelMaker, seed: int, decodes: bool) -> None:
    """Also of no rows, and with the ids of another stage."""
    rng = np.random.default_rng(seed)
    rows, tokens = random_rows(rng, decodes), history(rng)
    ours, theirs = both(make)
    for known in (tokens, None):
        batches = empty_batch(), empty_batch()
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
def test_settled_rows_are_equal(make: KernelMaker, seed: int) -> None:
    """Frontiers before the planned start, missing drafts, rows at the end of the context; one case has a row that is
    planned before its frontier."""
    rng = np.random.default_rng(seed)
    rows, tokens = random_rows(rng, False), history(rng)
    rows.starts[:] += rng.integers(0, 2, len(rows.slots)) * (LIMIT - rows.ends)
    frontier = np.full(SLOTS, EMPTY)
    frontier[rows.slots] = np.where(rng.random(len(rows.slots)) < 0.3, EMPTY, rows.starts - rows.drafts)
    if seed == 5:
        frontier[rows.slots[-1]] = rows.starts[-1] + 1
    results = []
    for each in both(make):
        drafts = SlotDrafts(
            torch.from_numpy(frontier.astype(np.int32)),
            torch.from_numpy(np.random.default_rng(seed).integers(0, MOST + 1, SLOTS).astype(np.int32)),
            torch.from_numpy(np.random.default_rng(seed).integers(0, VOCAB, (SLOTS, MOST)).astype(np.int32)),
        )
        own = tokens.clone()
        settled, bad = each.settle(rows, drafts, own)
        columns = None if settled is None else [column.tolist() for column in settled]
        results.append((columns, bad, own.tolist(), [tensor.tolist() for tensor in drafts]))
    assert results[0] == results[1]
    assert (results[0][1] >= 0) == (seed == 5)


@pytest.mark.parametrize("seed", range(8))
def test_verified_drafts_are_equal(make: KernelMaker, seed: int) -> None:
    rng = np.random.default_rng(seed)
    number = int(rng.integers(1, SLOTS + 1))
    slots = rng.permutation(SLOTS)[:number].astype(np.int32)
    drafts = rng.integers(0, MOST + 1, number).astype(np.int32)
    acceptable = np.minimum(drafts, rng.integers(0, MOST + 2, number)).astype(np.int32)
    firsts = rng.choice([1, 50, LIMIT - 2, LIMIT - 1], number).astype(np.int32)
    ids = torch.from_numpy(rng.integers(0, 2, int((drafts + 1).sum())).astype(np.int32))
    tokens = history(rng) % 2
    verified = [each.verify(slots, firsts, drafts, acceptable, ids, tokens) for each in both(make)]
    for ours, theirs in zip(*verified, strict=True):
        assert ours.tolist() == theirs.tolist()
