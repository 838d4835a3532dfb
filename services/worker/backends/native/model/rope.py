"""Frequencies of the rotary position embedding, and the order of a head's dimensions that they belong to."""

import math

import torch

from services.worker.backends.native.model.rope_config import Rope


def rotation(rope: Rope | None, head_dim: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return frequencies, in radians per position, and amplitudes: float32[head_dim / 2] each.

    Dimensions that are not rotated have the frequency 0 and the amplitude 1.

    Args:
        rope: None: nothing is rotated
        context: tokens of the longest sequence
    """
    rotated = torch.empty(0) if rope is None else _frequencies(rope, rope.rotated_dims(head_dim), context)
    frequencies, amplitudes = torch.zeros(head_dim // 2), torch.ones(head_dim // 2)
    frequencies[: len(rotated)] = rotated
    amplitudes[: len(rotated)] = _amplitude(rope) if rope is not None else 1.0
    return frequencies, amplitudes


def head_order(rope: Rope | None, head_dim: int) -> torch.Tensor | None:
    """Return the checkpoint's dimension for each dimension of a head in the kernels, int64[head_dim]; None: the same.

    The kernels rotate dimension i with dimension i + head_dim / 2. Scores do not depend on the order of dimensions, so
    neighbours that are rotated together move apart, and those that are not rotated move behind the rotated ones of each
    half.
    """
    size = head_dim if rope is None else rope.rotated_dims(head_dim)
    if rope is None or (size == head_dim and not rope.neighbours):
        return None
    rotated = torch.arange(size)
    first, second = (rotated[0::2], rotated[1::2]) if rope.neighbours else rotated.chunk(2)
    rest, more = torch.arange(size, head_dim).chunk(2)
    return torch.cat((first, rest, second, more))


def _frequencies(rope: Rope, dims: int, context: int) -> torch.Tensor:
    exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    frequencies = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(frequencies, rope)
        case "yarn":
            return _yarn(frequencies, rope, dims)
        case "longrope":
            is_long = rope.factors(context) == "long"
            factors = torch.tensor(rope.long_factors if is_long else rope.short_factors)
            return 1.0 / (factors * rope.theta**exponents)
    return frequencies


def _amplitude(rope: Rope) -> float:
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor or rope.factor <= 1.0:
        return rope.attention_factor or 1.0
    if rope.kind == "yarn":
        return 0.1 * math.log(rope.factor) + 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))


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


def _yarn(frequencies: torch.Tensor, rope: Rope, dims: int) -> torch.Tensor:
    """Keep dimensions that turn more than `beta_fast` times within the original context, stretch those that turn fewer
    than `beta_slow` times, and interpolate between by the number of the dimension."""

    def dimension(turns: float) -> float:
        wavelength = rope.original_max_position / (turns * 2 * math.pi)
        return dims * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = (torch.arange(dims // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return frequencies / rope.factor * (1 - kept) + frequencies * kept
