"""The transformer: Llama, Mistral, Qwen2 and Qwen3 are this one forward pass with different parts present."""

from dataclasses import dataclass

import torch

from services.worker.backends.native.attention import Attention, Context
from services.worker.backends.native.config import ModelConfig
from services.worker.backends.native.kernels.rows import gate_kernel, norm_kernel
from services.worker.backends.native.linear import Linear, activation_dtype
from services.worker.backends.native.weights import Checkpoint


@dataclass
class Layer:
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


class Model:
    """The weights of one rank, and the forward pass over a paged cache. For one calling thread."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        """Raises: LoadError, when a tensor is missing or has another shape."""
        self.config, self._activations = config, activation_dtype(dtype)
        half = self._activations == torch.bfloat16
        self._norm, self._gate = norm_kernel(half), gate_kernel(half)
        self._attention = Attention(config, self._activations, dtype)
        loader = _Loader(config, checkpoint, dtype, self._activations)
        self._embedding = loader.embedding()
        self._layers = [loader.layer(i) for i in range(config.num_layers)]
        self._final_norm = loader.vector("model.norm.weight", config.hidden_size)
        self._head = loader.head(self._embedding)

    def forward(self, ids: torch.Tensor, context: Context) -> torch.Tensor:
        """Computes every token of the step and writes its keys and values to the cache.

        Args:
            ids: int64[tokens]

        Returns:
            float32[sampling rows, vocab_size]: the logits after the last token of each row that samples
        """
        tokens, config, sampled = len(ids), self.config, context.batch.sampled
        attended = torch.empty(tokens, config.num_heads * config.head_dim, dtype=self._activations)
        self._attention.begin(context)
        residual = self._embedding[ids].float()
        delta: torch.Tensor | None = None
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normed(residual, delta, layer.input_norm))
            self._attention.run(number, qkv, layer.head_norms, attended)
            delta = layer.out(attended)
            gate_up = layer.gate_up(self._normed(residual, delta, layer.post_norm))
            delta = layer.down(self._gated(gate_up))
        if delta is None or not len(sampled):
            return torch.empty(0, config.vocab_size)
        return self._head(self._normed(residual[sampled], delta[sampled], self._final_norm)).float()

    def _normed(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        """Adds `delta` to float32[rows, hidden] `residual`, in place; returns the normalised sum as activations."""
        rows, width = residual.shape
        out = torch.empty(rows, width, dtype=self._activations)
        added = 0 if delta is None else delta.data_ptr()
        values = (residual.data_ptr(), added, weight.data_ptr(), out.data_ptr(), width, self.config.norm_eps)
        self._norm.run(rows, values)
        return out

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up: activations[rows, 2 * intermediate] to [rows, intermediate]."""
        rows, width = len(gate_up), self.config.intermediate_size
        out = torch.empty(rows, width, dtype=self._activations)
        self._gate.run(rows, (gate_up.data_ptr(), out.data_ptr(), width))
        return out


class _Loader:
    """Names and shapes of a checkpoint's tensors."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, activations: torch.dtype
    ) -> None:
        self._config, self._checkpoint = config, checkpoint
        self._dtype, self._activations = dtype, activations

    def embedding(self) -> torch.Tensor:
        """[vocab_size, hidden] in the model's dtype"""
        shape = (self._config.vocab_size, self._config.hidden_size)
        return self._checkpoint.take("model.embed_tokens.weight", shape, self._dtype)

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self._checkpoint.take(name, (size,), self._dtype).float()

    def layer(self, number: int) -> Layer:
        c, at = self._config, f"model.layers.{number}."
        heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        wide, hidden = c.intermediate_size, c.hidden_size
        q_norm, k_norm = (at + f"self_attn.{x}_norm.weight" for x in "qk")
        return Layer(
            input_norm=self.vector(at + "input_layernorm.weight", hidden),
            qkv=self._linear(
                at + "self_attn.", {"q_proj": heads, "k_proj": kv, "v_proj": kv}, hidden, c.qkv_bias
            ),
            head_norms=(self.vector(q_norm, c.head_dim), self.vector(k_norm, c.head_dim))
            if c.qk_norm
            else None,
            out=self._linear(at + "self_attn.", {"o_proj": hidden}, heads, c.out_bias),
            post_norm=self.vector(at + "post_attention_layernorm.weight", hidden),
            gate_up=self._linear(at + "mlp.", {"gate_proj": wide, "up_proj": wide}, hidden, c.mlp_bias),
            down=self._linear(at + "mlp.", {"down_proj": hidden}, wide, c.mlp_bias),
        )

    def head(self, embedding: torch.Tensor) -> Linear:
        c = self._config
        if c.tied:
            return Linear(embedding.to(self._activations))
        return self._linear("", {"lm_head": c.vocab_size}, c.hidden_size, bias=False)

    def _linear(self, at: str, parts: dict[str, int], width: int, bias: bool) -> Linear:
        """One product from several of the checkpoint, stacked."""
        weights = [self._product(f"{at}{name}.weight", size, width) for name, size in parts.items()]
        biases = [self._product(f"{at}{name}.bias", size) for name, size in parts.items() if bias]
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None)

    def _product(self, name: str, *shape: int) -> torch.Tensor:
        return self._checkpoint.take(name, shape, self._dtype).to(self._activations)
