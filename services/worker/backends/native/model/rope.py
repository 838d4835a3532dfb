"""Frequencies of the rotary position embedding."""

import math

import torch

from services.worker.backends.native.model.config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return float32[head_dim / 2], in radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, and interpolate between."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    blend = rope.original_max_position / wavelengths - rope.low_freq_factor
    blend = blend / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - blend) * frequencies / rope.factor + blend * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, between)
    return torch.where(wavelengths < shortest, frequencies, stretched)
