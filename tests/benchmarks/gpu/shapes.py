"""Shapes of models, and checkpoints of random weights that are never written to a disk."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.rope_config import Rope
from services.worker.kernels.quantized_weight import BlockRows
from services.worker.weights.checkpoint import Cut

TINY, TINY_SERVED = "tiny", "tiny-served"


def llama(
    hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int, tied: bool, positions: int = 16384
) -> ModelConfig:
    """A Llama without biases."""
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        max_position=positions,
        norm_eps=1e-5,
        tied=tied,
        ropes=(Rope(500000.0, "default"),) * layers,
        windows=(0,) * layers,
        dtype="bfloat16",
    )


SHAPES: Mapping[str, ModelConfig] = {
    "llama-3.2-1b": llama(2048, 16, 32, 8, 8192, 128256, True),
    "llama-3.1-8b": llama(4096, 32, 32, 8, 14336, 128256, False),
    TINY: llama(32, 2, 4, 2, 48, 64, True, 512),
    TINY_SERVED: llama(32, 2, 4, 2, 48, 4096, True, 512),
}


def product_parameters(shape: ModelConfig) -> int:
    """Return the number of weights that each token is multiplied by, without the head."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = shape.hidden_size * (2 * queries + 2 * keys + 3 * shape.intermediate_size)
    return layer * shape.num_layers


def head_parameters(shape: ModelConfig) -> int:
    return shape.vocab_size * shape.hidden_size


def kv_bytes_per_token(shape: ModelConfig, itemsize: int) -> int:
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * itemsize


@dataclass
class RandomCheckpoint:
    """`Checkpoint` whose tensors are random, on the device."""

    where: torch.device
    num_layers: int

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, cut: Cut = ()) -> torch.Tensor:
        sizes = [len(range(size)[part]) for size, part in zip(shape, cut, strict=False)]
        sizes += shape[len(cut) :]
        if name.endswith("norm.weight"):
            return torch.ones(sizes, dtype=dtype, device=self.where)
        return torch.randn(sizes, dtype=dtype, device=self.where).mul_(0.02)

    def blocks(self, name: str, shape: tuple[int, ...], cut: Cut = ()) -> BlockRows | None:
        return None

    def integers(self, name: str) -> torch.Tensor:
        raise KeyError(name)

    def __contains__(self, name: str) -> bool:
        no_layer = f"model.layers.{self.num_layers}."
        return not any(part in name for part in ("bias", "q_norm", "k_norm", "sinks", "lm_head", no_layer))

    def digest(self, config: bytes) -> str:
        return "random"
