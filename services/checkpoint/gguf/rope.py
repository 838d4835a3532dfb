"""Rotary scaling of a GGUF file as `rope_scaling` of config.json; kinds without a counterpart are refused by name."""

import math
from typing import Any

import numpy as np

from services.checkpoint.errors import CheckpointError
from services.checkpoint.gguf.header import GgufHeader
from services.checkpoint.gguf.names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Parameters of all published models of this kind. A file contains only the factors that are computed from them."""
_TOLERANCE = 1e-3


def rope_scaling(header: GgufHeader, head_dim: int, theta: float) -> dict[str, Any] | None:
    """Return the scaling, None for none. Raises: CheckpointError, for a kind that is not supported.

    Args:
        head_dim: rotated dimensions of a head.
    """
    at = f"{header.architecture}.rope."
    kind = header.text(at + "scaling.type", "none")
    factor = header.number(at + "scaling.factor", header.number(at + "scale_linear", 1.0))
    if not (LONG_FACTORS in header.tensors and SHORT_FACTORS in header.tensors):
        for key in ("attn_factor", *(("yarn_attn_factor", "yarn_ext_factor") if kind == "yarn" else ())):
            if (value := header.number(f"{at}scaling.{key}", 1.0)) not in (1.0, -1.0):  # -1: as computed
                raise CheckpointError(f"{header.path}: {at}scaling.{key} {value} is not supported")
    if ROPE_FACTORS in header.tensors:
        return _llama3(header, head_dim, theta)
    original = {"original_max_position_embeddings": header.integer(at + "scaling.original_context_length", 0)}
    if LONG_FACTORS in header.tensors and SHORT_FACTORS in header.tensors:
        return _longrope(header, head_dim, original)
    if kind == "yarn":
        keys = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        given = {ours: header.metadata.get(f"{at}scaling.{key}") for ours, key in keys.items()}
        betas = {name: value for name, value in given.items() if value is not None}
        exact = {"truncate": False} if header.architecture == "gpt-oss" else {}
        return {"rope_type": "yarn", "factor": factor, **original, **betas, **exact}
    if factor == 1.0 and kind in ("none", "linear"):
        return None
    if kind == "linear" or (kind == "none" and at + "scale_linear" in header.metadata):
        return {"rope_type": "linear", "factor": factor}
    raise CheckpointError(
        f"{header.path}: rotary scaling {kind!r} with the factor {factor} is not supported in GGUF files"
    )


def _read_factors(header: GgufHeader, name: str, head_dim: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    tensor = header.tensors[name]
    if tensor.type.name != "F32" or tensor.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{header.path}: {name} is {tensor.type.name} {list(tensor.shape)}, not F32 [{head_dim // 2}]"
        )
    with header.path.open("rb") as file:
        file.seek(tensor.begin)
        return np.frombuffer(file.read(tensor.size), "<f4").astype(np.float64)


def _longrope(header: GgufHeader, head_dim: int, original: dict[str, int]) -> dict[str, Any]:
    long, short = (_read_factors(header, name, head_dim).tolist() for name in (LONG_FACTORS, SHORT_FACTORS))
    attention = header.number(f"{header.architecture}.rope.scaling.attn_factor", 0.0)
    given = {"attention_factor": attention} if attention else {}
    return {"rope_type": "longrope", "long_factor": long, "short_factor": short, **original, **given}


def _llama3(header: GgufHeader, head_dim: int, theta: float) -> dict[str, Any]:
    factors = _read_factors(header, ROPE_FACTORS, head_dim)
    scaling = {"rope_type": "llama3", "factor": round(float(factors.max(initial=1.0)), 3), **_LLAMA3}
    for high in (4.0, 1.0):  # Llama 3.1 and 3.2, Llama 4
        scaling["high_freq_factor"] = high
        if np.allclose(factors, _factors(scaling, head_dim, theta), rtol=_TOLERANCE):
            return scaling
    raise CheckpointError(f"{header.path}: the values of {ROPE_FACTORS} are not those of Llama 3.1, 3.2 or 4")


def _factors(scaling: dict[str, Any], head_dim: int, theta: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """float64[head_dim / 2]: divisors of the frequencies. Source: `_compute_llama3_parameters` of transformers."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (scaling["original_max_position_embeddings"] / wavelengths - low) / max(high - low, 1e-9)
    divisors: np.ndarray[Any, np.dtype[np.float64]] = 1 / ((1 - smooth.clip(0, 1)) / factor + smooth.clip(0, 1))
    return divisors
