"""Sampling under Triton's interpreter against the reference."""

import numpy as np
import pytest
import torch

from services.worker.kernels.interface.sampling import DrawColumns, SamplingKernels
from tests.unit.native.cuda.kernel_cases import KernelMaker

ROWS = 6


def columns(rng: np.random.Generator, rows: int, vocab: int) -> DrawColumns:
    return DrawColumns(
        rng.choice([0.0, 0.3, 1.0, 1.7], rows).astype(np.float32),
        rng.choice([0.0, 0.1], rows).astype(np.float32),
        rng.choice([0, 1, 7, vocab - 1, vocab, vocab + 5], rows).astype(np.int32),
        rng.choice([1.0, 0.9, 0.5, 0.01], rows).astype(np.float32),
        rng.integers(0, 2**64, rows, np.uint64),
        rng.integers(1, 60, rows).astype(np.int32),
    )


@pytest.mark.parametrize("vocab", [1, 31, 1024, 2500])
def test_choices_equal_the_reference(make: KernelMaker, vocab: int) -> None:
    """Vocabularies of one, less than one, exactly one and several blocks."""
    rng = np.random.default_rng(vocab)
    logits = torch.tensor(rng.normal(0, 2, (12, vocab)), dtype=torch.float32)
    drawn = columns(rng, 12, vocab)
    ours = make().sampling.choose(logits.clone(), drawn)
    assert ours.tolist() == SamplingKernels().choose(logits, drawn).tolist()


def test_choices_in_a_vocabulary_with_more_blocks_than_programs(make: KernelMaker) -> None:
    """33 blocks: the parts of 17 programs have two blocks each, and those of the other 15 have no token. A row is
    sampled alone as in a batch."""
    rng = np.random.default_rng(7)
    logits = torch.tensor(rng.normal(0, 2, (2, 33 * 1024 - 20)), dtype=torch.float32)
    drawn = DrawColumns(
        np.array([1.0, 0.7], np.float32), np.array([0.0, 0.001], np.float32), np.array([300, 0], np.int32),
        np.array([0.95, 0.8], np.float32), np.array([5, 6], np.uint64), np.array([3, 9], np.int32),
    )  # fmt: skip
    ours = make().sampling.choose(logits.clone(), drawn).tolist()
    assert ours == SamplingKernels().choose(logits, drawn).tolist()
    alone = DrawColumns(*(column[:1] for column in drawn))
    assert make().sampling.choose(logits[:1].clone(), alone).tolist() == ours[:1]


def test_greedy_takes_the_lowest_of_equal_maxima(make: KernelMaker) -> None:
    logits = torch.full((4, 2500), -np.inf)
    logits[0, [2040, 1030, 2499]] = 5.0
    logits[1, 2499] = -3.0
    logits[2] = 1.0
    assert make().sampling.greedy(logits).tolist() == [1030, 2499, 0, 0]
    assert len(make().sampling.greedy(logits[:0])) == 0


def test_a_row_without_possible_tokens_is_sampled_as_token_0(make: KernelMaker) -> None:
    rng = np.random.default_rng(2)
    logits = torch.full((ROWS, 50), -np.inf)
    drawn = columns(rng, ROWS, 50)._replace(temperature=np.ones(ROWS, np.float32))
    assert make().sampling.choose(logits, drawn).tolist() == [0] * ROWS


@pytest.mark.parametrize("vocab", [31, 1100])
def test_bitmasks_equal_the_reference(make: KernelMaker, vocab: int) -> None:
    """Rows with some, one, and no token, and a row whose tokens are all forbidden already."""
    rng = np.random.default_rng(vocab)
    logits = torch.tensor(rng.normal(0, 2, (ROWS, vocab)), dtype=torch.float32)
    rows = np.array([4, 0, 1, 2], np.int32)
    bits = rng.random((4, -(-vocab // 32) * 32)) < 0.5
    bits[1], bits[2] = False, False
    bits[1, vocab - 1] = True
    logits[2, bits[3][:vocab]] = -np.inf
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    expected = logits.clone()
    SamplingKernels().apply_bitmask(expected, rows, words)
    make().sampling.apply_bitmask(logits, rows, words)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("vocab", [1, 31, 1100])
def test_logprobs_equal_the_reference(make: KernelMaker, vocab: int) -> None:
    """With equal logits, zeros of both signs, minus infinity, and different numbers of alternatives."""
    rng = np.random.default_rng(vocab)
    logits = torch.tensor(rng.normal(0, 3, (ROWS, vocab)), dtype=torch.float32).round()
    logits[logits == -1] = -0.0
    logits[3, : vocab // 2] = -np.inf
    rows = np.array([5, 3, 0], np.int32)
    tokens = torch.from_numpy(rng.integers(vocab // 2, vocab, 3).astype(np.int32))
    for tops in ([0, 0, 0], [vocab, 0, min(5, vocab)], [1, 1, 1]):
        ours = make().sampling.logprobs(logits, rows, tokens, np.array(tops, np.int32))
        theirs = SamplingKernels().logprobs(logits, rows, tokens, np.array(tops, np.int32))
        assert ours.counts.tolist() == theirs.counts.tolist()
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert ours.token_ranks.tolist() == theirs.token_ranks.tolist()
        torch.testing.assert_close(ours.values, theirs.values, atol=1e-5, rtol=1e-5)
