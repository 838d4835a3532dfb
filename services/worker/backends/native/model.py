"""The transformer: Llama, Mistral, Qwen2 and Qwen3 are this one forward pass with different parts present."""

from dataclasses import dataclass

import numpy as np
import torch

from services.worker.backends.native.batch import Batch
from services.worker.backends.native.config import ModelConfig
from services.worker.backends.native.kernels.attention import attention_kernel, write_kernel
from services.worker.backends.native.kernels.rows import gate_kernel, norm_kernel
from services.worker.backends.native.kv_cache import KVCache, padded
from services.worker.backends.native.linear import Linear, activation_dtype
from services.worker.backends.native.rope import inverse_frequencies
from services.worker.backends.native.weights import Checkpoint


@dataclass
class Layer:
    input_norm: torch.Tensor
    """float32[hidden]"""
    qkv: Linear
    """hidden to (heads + 2 * kv_heads) * head_dim"""
    q_norm: torch.Tensor | None
    """float32[head_dim]"""
    k_norm: torch.Tensor | None
    out: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    """hidden to 2 * intermediate"""
    down: Linear
    window: int


class Model:
    """The weights of one rank, and the forward pass over a paged cache."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        """Raises: LoadError, when a tensor is missing or has another shape."""
        self.config, self.activations = config, activation_dtype(dtype)
        half, half_cache = self.activations == torch.bfloat16, dtype == torch.bfloat16
        self._norm, self._gate = norm_kernel(half), gate_kernel(half)
        self._write, self._attend = write_kernel(half, half_cache), attention_kernel(half, half_cache)
        self._frequencies = inverse_frequencies(config.rope, config.head_dim)
        loader = _Loader(config, checkpoint, dtype, self.activations)
        self._embedding = loader.take(
            "model.embed_tokens.weight", config.vocab_size, config.hidden_size, dtype=dtype
        )
        self._layers = [loader.layer(i) for i in range(config.num_layers)]
        self._final_norm = loader.vector("model.norm.weight", config.hidden_size)
        self._head = loader.head(self._embedding)

    def forward(
        self,
        ids: torch.Tensor,
        batch: Batch,
        cache: KVCache,
        table: np.ndarray[tuple[int, int], np.dtype[np.int32]],
    ) -> torch.Tensor:
        """Computes every token of `batch`, writes its keys and values to `cache`, and returns the logits of the
        sampled ones.

        Args:
            ids: int64[tokens]
            table: int32[slots, blocks], the block table of every slot

        Returns:
            float32[sampling rows, vocab_size]
        """
        config, tokens = self.config, len(ids)
        hidden, kind = config.hidden_size, self.activations
        residual = self._embedding[ids].float()
        normed = torch.empty(tokens, hidden, dtype=kind)
        attended = torch.empty(tokens, config.num_heads * config.head_dim, dtype=kind)
        gated = torch.empty(tokens, config.intermediate_size, dtype=kind)
        attention = _Attention(self, batch, cache, table)
        delta: torch.Tensor | None = None
        for number, layer in enumerate(self._layers):
            self._normalise(residual, delta, layer.input_norm, normed)
            attention.run(number, layer, layer.qkv(normed), attended)
            delta = layer.out(attended)
            self._normalise(residual, delta, layer.post_norm, normed)
            gate_up = layer.gate_up(normed)
            values = (gate_up.data_ptr(), gated.data_ptr(), config.intermediate_size)
            self._gate.run(tokens, values)
            delta = layer.down(gated)
        if not len(batch.sampled):
            return torch.empty(0, config.vocab_size)
        residual = residual[batch.sampled]
        delta = delta[batch.sampled] if delta is not None else None
        normed = torch.empty(len(residual), hidden, dtype=kind)
        self._normalise(residual, delta, self._final_norm, normed)
        return self._head(normed).float()

    def _normalise(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor
    ) -> None:
        values = (
            residual.data_ptr(),
            0 if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            self.config.hidden_size,
            self.config.norm_eps,
        )
        self._norm.run(len(residual), values)


class _Attention:
    """What the attention of every layer of one step shares."""

    def __init__(
        self,
        model: Model,
        batch: Batch,
        cache: KVCache,
        table: np.ndarray[tuple[int, int], np.dtype[np.int32]],
    ) -> None:
        config = model.config
        self._model, self._batch, self._cache, self._table = model, batch, cache, table
        angles = batch.positions[:, None] * model._frequencies
        self._cos, self._sin = angles.cos(), angles.sin()
        dim, lanes = padded(config.head_dim), padded(cache.block_size)
        self._queries = torch.empty(len(batch.slots), config.num_heads, dim)
        self._common = (
            *(table.ctypes.data, table.shape[1], cache.block_size, lanes),
            *(config.num_heads, config.num_kv_heads, config.head_dim, dim, self._queries.data_ptr()),
        )
        self._write = (
            batch.slots.data_ptr(),
            batch.positions.data_ptr(),
            self._cos.data_ptr(),
            self._sin.data_ptr(),
        )
        blocks = -(-batch.longest // cache.block_size) + 1
        self._scratch = batch.widest * (config.num_heads // config.num_kv_heads) * blocks * lanes

    def run(self, number: int, layer: Layer, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Attention of layer `number` into `out`. All keys are written before any is read (spec 0.7)."""
        model, config, batch = self._model, self._model.config, self._batch
        common = (self._cache.keys[number].data_ptr(), self._cache.values[number].data_ptr(), *self._common)
        norms = [0 if w is None else w.data_ptr() for w in (layer.q_norm, layer.k_norm)]
        values = (*common, qkv.data_ptr(), *self._write, *norms, config.norm_eps, config.head_dim**-0.5)
        model._write.run(len(batch.slots), values)
        values = (*common, out.data_ptr(), batch.tiles.data_ptr(), layer.window, self._scratch)
        model._attend.run(batch.num_tiles * config.num_kv_heads, values)


class _Loader:
    """Names and shapes of a checkpoint's tensors."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, products: torch.dtype
    ) -> None:
        self._config, self._checkpoint, self._dtype, self._products = config, checkpoint, dtype, products

    def take(self, name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return self._checkpoint.take(name, shape, dtype)

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self.take(name, size, dtype=self._dtype).float()

    def layer(self, number: int) -> Layer:
        c, at = self._config, f"model.layers.{number}."
        heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        wide, hidden = c.intermediate_size, c.hidden_size
        return Layer(
            input_norm=self.vector(at + "input_layernorm.weight", hidden),
            qkv=self._linear(
                at + "self_attn.", {"q_proj": heads, "k_proj": kv, "v_proj": kv}, hidden, c.qkv_bias
            ),
            q_norm=self.vector(at + "self_attn.q_norm.weight", c.head_dim) if c.qk_norm else None,
            k_norm=self.vector(at + "self_attn.k_norm.weight", c.head_dim) if c.qk_norm else None,
            out=self._linear(at + "self_attn.", {"o_proj": hidden}, heads, c.out_bias),
            post_norm=self.vector(at + "post_attention_layernorm.weight", hidden),
            gate_up=self._linear(at + "mlp.", {"gate_proj": wide, "up_proj": wide}, hidden, c.mlp_bias),
            down=self._linear(at + "mlp.", {"down_proj": hidden}, wide, c.mlp_bias),
            window=c.windows[number],
        )

    def head(self, embedding: torch.Tensor) -> Linear:
        c = self._config
        if c.tied:
            return Linear(embedding.to(self._products))
        return self._linear("", {"lm_head": c.vocab_size}, c.hidden_size, bias=False)

    def _linear(self, at: str, parts: dict[str, int], width: int, bias: bool) -> Linear:
        """One matrix product from several of the checkpoint, stacked."""
        weights = [self._product(f"{at}{name}.weight", size, width) for name, size in parts.items()]
        biases = [self._product(f"{at}{name}.bias", size) for name, size in parts.items() if bias]
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None)

    def _product(self, name: str, *shape: int) -> torch.Tensor:
        return self.take(name, *shape, dtype=self._dtype).to(self._products)
