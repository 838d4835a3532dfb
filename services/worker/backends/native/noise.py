"""The noise of `services.worker.noise` in torch, on any device: the same bits."""

import numpy as np
import torch

from services.worker.noise import MIX_A, MIX_B, PRIME, Purpose, keys


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """The logical shift that int32 does not have."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def bits(key0: torch.Tensor, key1: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """int32[rows, tokens] words for int32 keys[rows] and ids[tokens]."""
    x = tokens[None, :] * _signed(PRIME) + key0[:, None]
    x ^= _shift(x, 16)
    x *= _signed(MIX_A)
    x ^= key1[:, None]
    x ^= _shift(x, 15)
    x *= _signed(MIX_B)
    x ^= _shift(x, 16)
    return x


def gumbel(
    seeds: np.ndarray[tuple[int], np.dtype[np.uint64]],
    positions: np.ndarray[tuple[int], np.dtype[np.int32]],
    vocab_size: int,
    device: torch.device,
    purpose: Purpose = Purpose.SAMPLE,
) -> torch.Tensor:
    """float32[rows, vocab_size] standard Gumbel noise."""
    key0, key1 = (torch.from_numpy(k.view(np.int32)).to(device) for k in keys(seeds, positions, purpose))
    words = bits(key0, key1, torch.arange(vocab_size, dtype=torch.int32, device=device))
    uniform = (_shift(words, 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))
