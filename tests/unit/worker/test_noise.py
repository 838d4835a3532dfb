"""The noise contract: fixed bits, the right distribution, and independence of everything else."""

import numpy as np
import pytest

from services.worker.sampling.noise import bits, gumbel, keys, uniform

N = 20_000
FIRST_BITS = [838934107, 3814150781, 487022261]


def _reference(seed: int, position: int, token: int) -> int:
    """Compute the contract of the module's docstring with plain Python integers."""
    mask = 0xFFFFFFFF

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & mask
        x ^= x >> 15
        x = x * 0x846CA68B & mask
        return x ^ (x >> 16)

    key0 = mix(mix(mix((seed & mask) ^ 0x9E3779B9) ^ (seed >> 32)) ^ position)
    key1 = mix(key0 + 0x85EBCA6B & mask)
    key0 = mix(key1 ^ 0xC2B2AE35)
    x = token * 0x9E3779B1 + key0 & mask
    x ^= x >> 16
    x = x * 0x7FEB352D & mask
    x ^= key1
    x ^= x >> 15
    x = x * 0x846CA68B & mask
    return x ^ (x >> 16)


def test_the_bits_are_those_of_the_contract() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 20, np.uint64)
    positions = rng.integers(0, 2**31, 20).astype(np.int32)
    got = bits(*keys(seeds, positions), np.arange(7))
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        assert got[row].tolist() == [_reference(seed, position, token) for token in range(7)]
    assert [_reference(42, 17, token) for token in range(3)] == FIRST_BITS, "as in earlier releases"


def test_uniform_is_inside_the_open_interval() -> None:
    values = uniform(np.array([0, 2**32 - 1], np.uint32))
    assert 0 < values[0] < values[1] < 1


@pytest.mark.parametrize(
    ("seeds", "positions"),
    [
        (np.full(N, 7, np.uint64), np.arange(N)),
        (np.arange(N, dtype=np.uint64), np.full(N, 3)),
        (np.arange(N, dtype=np.uint64) << np.uint64(32), np.full(N, 3)),
    ],
)
def test_argmax_samples_the_softmax(seeds: np.ndarray, positions: np.ndarray) -> None:
    probabilities = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    chosen = (np.log(probabilities).astype(np.float32) + gumbel(seeds, positions, np.arange(5))).argmax(1)
    counts = np.bincount(chosen, minlength=5)
    chi2 = ((counts - N * probabilities) ** 2 / (N * probabilities)).sum()
    assert chi2 < 23.5  # 4 degrees of freedom, p = 0.0001; the input is fixed, so the result is too


def test_neighbours_are_uncorrelated() -> None:
    seeds, positions = np.full(N, 7, np.uint64), np.arange(N)
    columns = list(gumbel(seeds, positions, np.arange(4)).T)
    columns += [np.roll(columns[0], 1), np.roll(columns[1], 1)]
    correlation = np.corrcoef(np.array(columns)) - np.eye(len(columns))
    assert np.abs(correlation).max() < 0.03


def test_a_row_does_not_depend_on_other_rows() -> None:
    seeds, positions = np.arange(9, dtype=np.uint64), np.arange(9)
    together = gumbel(seeds, positions, np.arange(101))
    for i in range(9):
        assert np.array_equal(together[i], gumbel(seeds[i : i + 1], positions[i : i + 1], np.arange(101))[0])
