"""Greedy decoding of a static batch of a Llama in bare torch: the speed of the CPU without an engine.

It only decodes, over a contiguous cache with random contents. It is an upper bound, because the weights are packed once
for oneDNN, the heads of a KV group are folded into query rows, and a layer has few Python calls.
"""

import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from tests.benchmarks.support.servers import BatchLoad

# torch has no public names for oneDNN's products.
bfloat16_supported = torch.ops.mkldnn._is_mkldnn_bf16_supported  # noqa: SLF001
pack_weight = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001
packed_product = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001


class BareLlama:
    def __init__(self, directory: Path, dtype: torch.dtype, batch: int, context: int) -> None:
        self.packs = dtype == torch.float32 or bfloat16_supported()
        config = json.loads((directory / "config.json").read_text())
        weights = {name: tensor.to(dtype) for name, tensor in load_file(directory / "model.safetensors").items()}
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim, self.eps, self.batch = config["head_dim"], config["rms_norm_eps"], batch
        self.embedding, self.norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        self.layers = [self._layer(weights, f"model.layers.{i}.") for i in range(config["num_hidden_layers"])]
        self.head = self._pack(self.embedding)
        shape = (len(self.layers), 2, batch, self.kv_heads, context, self.dim)
        self.cache = torch.randn(shape, dtype=torch.float32).to(dtype)
        angles = torch.outer(torch.arange(context), config["rope_theta"] ** (-torch.arange(0, self.dim, 2) / self.dim))
        angles = torch.cat((angles, angles), 1)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def _layer(self, weights: dict[str, Tensor], name: str) -> tuple[Tensor, ...]:
        def join(*parts: str) -> Tensor:
            return self._pack(torch.cat([weights[f"{name}{part}_proj.weight"] for part in parts]))

        return (
            weights[name + "input_layernorm.weight"],
            join("self_attn.q", "self_attn.k", "self_attn.v"),
            join("self_attn.o"),
            weights[name + "post_attention_layernorm.weight"],
            join("mlp.gate", "mlp.up"),
            join("mlp.down"),
        )

    def _pack(self, weight: Tensor) -> Tensor:
        return pack_weight(weight, None) if self.packs else weight

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.packs:
            return packed_product(x, weight, None, "none", [], "")
        return F.linear(x, weight)

    def _rotate(self, x: Tensor, position: int) -> Tensor:
        half = self.dim // 2
        rotated = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * self.cos[position] + rotated * self.sin[position]

    def step(self, tokens: Tensor, position: int) -> Tensor:
        """Return the next greedy tokens, int64[batch], after `tokens` at `position`."""
        x = self.embedding[tokens]
        split = self.heads + self.kv_heads
        for index, (norm_1, qkv, out, norm_2, gate_up, down) in enumerate(self.layers):
            keys, values = self.cache[index]
            rows = self._linear(F.rms_norm(x, norm_1.shape, norm_1, self.eps), qkv)
            rows = rows.view(self.batch, split + self.kv_heads, self.dim)
            rotated = self._rotate(rows[:, :split], position)
            keys[:, :, position], values[:, :, position] = rotated[:, self.heads :], rows[:, split:]
            folded = rotated[:, : self.heads].view(self.batch, self.kv_heads, -1, self.dim)
            past = slice(position + 1)
            mixed = F.scaled_dot_product_attention(folded, keys[:, :, past], values[:, :, past])
            x = x + self._linear(mixed.reshape(self.batch, -1), out)
            gate, up = self._linear(F.rms_norm(x, norm_2.shape, norm_2, self.eps), gate_up).chunk(2, -1)
            x = x + self._linear(F.silu(gate) * up, down)
        return self._linear(F.rms_norm(x, self.norm.shape, self.norm, self.eps), self.head).argmax(-1)


@torch.inference_mode()
def measure(load: BatchLoad) -> dict[str, float]:
    torch.set_num_threads(load.threads)
    model = BareLlama(load.model, getattr(torch, load.dtype), load.batch, load.prompt + load.output)
    tokens = torch.arange(300, 300 + load.batch)
    for position in range(load.prompt, load.prompt + 8):
        tokens = model.step(tokens, position)
    started = time.perf_counter()
    for _ in range(load.waves):
        for position in range(load.prompt, load.prompt + load.output):
            tokens = model.step(tokens, position)
    seconds = time.perf_counter() - started
    total = load.waves * load.output * load.batch
    return {"tokens_per_s": total / seconds, "seconds": seconds, "tokens": total}
