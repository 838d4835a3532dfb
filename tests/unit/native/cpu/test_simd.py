"""Vector functions that numba compiles: the noise has the bits of the contract, the logarithm is exact enough."""

import numpy as np
from numba import njit

from services.worker.kernels.cpu.compiled import simd
from services.worker.sampling import noise


@njit
def uniform(token: int, key0: int, key1: int, out: int) -> None:
    simd.store_f32x16(out, simd.uniform(token, key0, key1))


@njit
def logarithm(values: int, out: int) -> None:
    simd.store_f32x16(out, simd.log(simd.load_f32x16(values)))


def test_noise_has_the_bits_of_the_contract() -> None:
    seeds = np.array([0, 1, 2**31, 2**32 - 1, 2**63 + 12345, 2**64 - 1], np.uint64)
    positions = np.array([0, 1, 77, 2**20, 131071, 5], np.int32)
    key0, key1 = noise.keys(seeds, positions)
    expected = noise.uniform(noise.bits(key0, key1, np.arange(3200)))
    ours = np.empty_like(expected)
    for row in range(len(seeds)):
        for token in range(0, 3200, 16):
            uniform(token, int(key0[row]), int(key1[row]), ours[row, token:].ctypes.data)
    assert np.array_equal(ours, expected)


def test_logarithm() -> None:
    rng = np.random.default_rng(0)
    near_one = 1 - rng.random(1600) * 2.0 ** -rng.integers(0, 23, 1600)
    values = np.concatenate([near_one, np.exp(rng.uniform(-17, 3, 1600)), [2.0**-24, 1 - 2.0**-24] * 8])
    values = values.astype(np.float32)
    ours = np.empty_like(values)
    for i in range(0, len(values), 16):
        logarithm(values[i:].ctypes.data, ours[i:].ctypes.data)
    np.testing.assert_allclose(ours, np.log(values.astype(np.float64)), rtol=3e-7, atol=0)
