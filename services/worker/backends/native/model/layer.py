"""The weights of one decoder layer."""

from dataclasses import dataclass

import torch

from services.worker.backends.native.model.experts import Experts
from services.worker.kernels.interface.products import Linear


@dataclass(frozen=True)
class Mlp:
    gate_up: Linear
    """hidden to 2 * intermediate"""
    down: Linear
    """intermediate to hidden"""


@dataclass(frozen=True)
class Layer:
    """Numbers of heads, KV heads and intermediate dimensions are those of this rank. Norms are float32[hidden]; None:
    the layer has no such norm."""

    attention_in: torch.Tensor | None
    attention_out: torch.Tensor | None
    mlp_in: torch.Tensor | None
    mlp_out: torch.Tensor | None
    qkv: Linear
    """hidden to (heads + 2 * kv_heads) * head_dim"""
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    """Norms of queries and of keys: float32[head_dim] each, or float32[heads * head_dim] and float32[kv_heads *
    head_dim]"""
    sinks: torch.Tensor | None
    """float32[heads]"""
    out: Linear
    """heads * head_dim to hidden"""
    mlp: Mlp | Experts
