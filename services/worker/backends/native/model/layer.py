"""The weights of one decoder layer."""

from dataclasses import dataclass

import torch

from services.worker.backends.native.kernels.interface.products import Linear


@dataclass(frozen=True)
class Layer:
    """Numbers of heads, KV heads and intermediate dimensions are those of this rank."""

    input_norm: torch.Tensor
    """float32[hidden]"""
    qkv: Linear
    """hidden to (heads + 2 * kv_heads) * head_dim"""
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    """float32[head_dim] each, of queries and of keys"""
    out: Linear
    """heads * head_dim to hidden"""
    post_norm: torch.Tensor
    """float32[hidden]"""
    gate_up: Linear
    """hidden to 2 * intermediate"""
    down: Linear
    """intermediate to hidden"""
