"""Names and shapes of a checkpoint's tensors, and the share of each that a rank reads."""

from typing import Literal

import torch
from torch.nn import functional

from services.worker.backends.native.device.interface import ComputeDevice
from services.worker.backends.native.kernels.interface.network import NetworkKernels
from services.worker.backends.native.kernels.interface.products import EmbeddingTable, Linear
from services.worker.backends.native.kernels.quantized_weight import (
    Quantization,
    QuantizedWeight,
    Weight,
    quantized,
    stacked,
)
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.gguf_blocks import weight_from_blocks
from services.worker.backends.native.model.layer import Layer
from services.worker.backends.native.model.partition import ModelPart
from services.worker.weights import Checkpoint, Cut

Wanted = Quantization | Literal["none"] | None


class ShardLoader:
    """Reads the weights of one rank; the methods raise LoadError when a tensor is missing or has another shape.

    Args:
        device: where vectors are kept; the network's own weights are on it too
        quantization: type of all products; the embedding and the head have 8 bits. None: quantised blocks of the file
            are kept, or converted to int8 if the kernels cannot compute with them; "none": they are dequantised.
    """

    def __init__(
        self,
        part: ModelPart,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        network: NetworkKernels,
        device: ComputeDevice,
        quantization: Wanted = None,
    ) -> None:
        self._part, self._whole, self._checkpoint = part, part.whole, checkpoint
        self._dtype, self._network, self._quantization = dtype, network, quantization
        self._device = device
        self.types: set[str] = set()
        """Types of the weights read so far."""

    def embedding(self) -> EmbeddingTable:
        """Vectors of this rank's token ids. A tied head pads them with zeros to `vocabulary_width` vectors."""
        weight = self._tokens("model.embed_tokens.weight")
        return self._network.embedding(self._padded(weight) if self._whole.tied else weight)

    def vector(self, name: str, size: int) -> torch.Tensor:
        """float32[size]"""
        return self._device.keep(self._checkpoint.take(name, (size,), self._dtype).float())

    def layer(self, number: int) -> Layer:
        c, part, at = self._whole, self._part, f"model.layers.{number}."
        heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        intermediate, hidden = c.intermediate_size, c.hidden_size
        own_heads, own_kv = (_scaled(s, c.head_dim) for s in (part.heads, part.kv_heads))
        q_norm, k_norm = (at + f"self_attn.{x}_norm.weight" for x in "qk")
        qkv = {"q_proj": (heads, own_heads), "k_proj": (kv, own_kv), "v_proj": (kv, own_kv)}
        gate_up = {
            "gate_proj": (intermediate, part.intermediate),
            "up_proj": (intermediate, part.intermediate),
        }
        return Layer(
            input_norm=self.vector(at + "input_layernorm.weight", hidden),
            qkv=self._by_outputs(at + "self_attn.", qkv, c.qkv_bias),
            head_norms=(self.vector(q_norm, c.head_dim), self.vector(k_norm, c.head_dim))
            if c.qk_norm
            else None,
            out=self._by_inputs(at + "self_attn.o_proj", heads, own_heads, c.out_bias),
            post_norm=self.vector(at + "post_attention_layernorm.weight", hidden),
            gate_up=self._by_outputs(at + "mlp.", gate_up, c.mlp_bias),
            down=self._by_inputs(at + "mlp.down_proj", intermediate, part.intermediate, c.mlp_bias),
        )

    def head(self, embedding: EmbeddingTable | None) -> Linear:
        """A product from hidden states to `vocabulary_width` logits; logits beyond the rank's token ids are zero."""
        if self._whole.tied and embedding is not None:
            return self._network.tied(embedding)
        name = "model.embed_tokens.weight" if self._whole.tied else "lm_head.weight"
        return self._network.linear(self._padded(self._tokens(name)))

    def _padded(self, weight: Weight) -> Weight:
        missing = self._part.vocabulary_width - weight.shape[0]
        if isinstance(weight, QuantizedWeight):
            return weight.padded(missing)
        return functional.pad(weight, (0, 0, 0, missing)) if missing else weight

    def _tokens(self, name: str) -> Weight:
        shape = (self._whole.vocab_size, self._whole.hidden_size)
        wanted = "int8" if self._quantization == "int4" else self._quantization
        return self._weight(name, shape, (self._part.vocabulary,), wanted)

    def _by_outputs(self, at: str, parts: dict[str, tuple[int, slice]], bias: bool) -> Linear:
        """Stack several products of the checkpoint. `parts`: number of outputs of each, and this rank's share."""
        hidden = self._whole.hidden_size
        weights = [
            self._weight(f"{at}{x}.weight", (size, hidden), (own,), self._quantization)
            for x, (size, own) in parts.items()
        ]
        biases = [self._product(f"{at}{x}.bias", (size,), own) for x, (size, own) in parts.items() if bias]
        return self._network.linear(stacked(weights), torch.cat(biases) if biases else None)

    def _by_inputs(self, name: str, width: int, own: slice, bias: bool) -> Linear:
        """A product with this rank's share of the inputs. Its results are summed over the ranks."""
        hidden = self._whole.hidden_size
        weight = self._weight(f"{name}.weight", (hidden, width), (slice(None), own), self._quantization)
        adds = bias and self._part.adds_bias
        if isinstance(weight, torch.Tensor):
            weight = weight.contiguous()
        return self._network.linear(weight, self._product(f"{name}.bias", (hidden,)) if adds else None)

    def _weight(self, name: str, shape: tuple[int, int], cut: Cut, wanted: Wanted) -> Weight:
        weight = self._read(name, shape, cut, wanted)
        self.types.add(weight.kind if isinstance(weight, QuantizedWeight) else str(weight.dtype))
        return weight

    def _read(self, name: str, shape: tuple[int, int], cut: Cut, wanted: Wanted) -> Weight:
        if wanted == "none":
            return self._product(name, shape, *cut)
        if (blocks := self._checkpoint.blocks(name, shape, cut)) is not None:
            kept = weight_from_blocks(blocks)
            if kept is not None and (wanted != "int4" or kept.kind == "int4"):
                return kept
            wanted = wanted or "int8"
        if wanted is None:
            return self._product(name, shape, *cut)
        return quantized(self._checkpoint.take(name, shape, torch.float32, cut), wanted)

    def _product(self, name: str, shape: tuple[int, ...], *cut: slice) -> torch.Tensor:
        return self._checkpoint.take(name, shape, self._dtype, cut)


def has_blocks(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Return whether the file contains quantised products."""
    shape = config.hidden_size, config.intermediate_size
    return checkpoint.blocks("model.layers.0.mlp.down_proj.weight", shape, (slice(1),)) is not None


def _scaled(share: slice, size: int) -> slice:
    return slice(share.start * size, share.stop * size)
