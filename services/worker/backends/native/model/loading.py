"""Names and shapes of a checkpoint's tensors, and the share of each that a rank reads."""

import torch
from torch.nn import functional

from services.worker.backends.native.kernels.interface import Linear, NetworkKernels
from services.worker.backends.native.model.layer import Layer
from services.worker.backends.native.model.partition import Part
from services.worker.weights import Checkpoint


class ShardLoader:
    """Reads the weights of one rank; the methods raise LoadError when a tensor is missing or has another shape."""

    def __init__(
        self, part: Part, checkpoint: Checkpoint, dtype: torch.dtype, network: NetworkKernels
    ) -> None:
        self._part, self._whole, self._checkpoint = part, part.whole, checkpoint
        self._dtype, self._network = dtype, network

    def embedding(self) -> torch.Tensor:
        """[this rank's token ids, hidden] in the model's dtype"""
        return self._tokens("model.embed_tokens.weight")

    def vector(self, name: str, size: int) -> torch.Tensor:
        """float32[size]"""
        return self._checkpoint.take(name, (size,), self._dtype).float()

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

    def head(self, embedding: torch.Tensor | None) -> Linear:
        """hidden to `vocabulary_width` logits; where a rank has fewer token ids, the last ones are zero."""
        if not self._whole.tied:
            weight = self._tokens("lm_head.weight")
        else:
            weight = self.embedding() if embedding is None else embedding
        missing = self._part.vocabulary_width - len(weight)
        return self._network.linear(functional.pad(weight, (0, 0, 0, missing)))

    def _tokens(self, name: str) -> torch.Tensor:
        shape = (self._whole.vocab_size, self._whole.hidden_size)
        return self._checkpoint.take(name, shape, self._dtype, (self._part.vocabulary,))

    def _by_outputs(self, at: str, parts: dict[str, tuple[int, slice]], bias: bool) -> Linear:
        """One product from several of the checkpoint, stacked. `parts`: number of outputs, and this rank's share."""
        hidden = self._whole.hidden_size
        weights = [self._product(f"{at}{x}.weight", (size, hidden), own) for x, (size, own) in parts.items()]
        biases = [self._product(f"{at}{x}.bias", (size,), own) for x, (size, own) in parts.items() if bias]
        return self._network.linear(torch.cat(weights), torch.cat(biases) if biases else None)

    def _by_inputs(self, name: str, width: int, own: slice, bias: bool) -> Linear:
        """A product that yields a summand of every output, from this rank's share of the inputs."""
        hidden = self._whole.hidden_size
        weight = self._product(f"{name}.weight", (hidden, width), slice(None), own)
        adds = bias and self._part.adds_bias
        return self._network.linear(
            weight.contiguous(), self._product(f"{name}.bias", (hidden,)) if adds else None
        )

    def _product(self, name: str, shape: tuple[int, ...], *cut: slice) -> torch.Tensor:
        return self._checkpoint.take(name, shape, self._dtype, cut)


def _scaled(share: slice, size: int) -> slice:
    return slice(share.start * size, share.stop * size)
