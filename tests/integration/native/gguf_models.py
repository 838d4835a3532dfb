"""Tiny models as GGUF files, written with the `gguf` package, and their counterparts in transformers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.integration.native.conftest import Family

SMALL = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "rope_theta": 5000.0,
}
WIDE = {
    **SMALL,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "initializer_range": 0.1,
}
"""For types with blocks of 256 elements."""
LLAMA31 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "llama-biased": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, head_dim=24)
    ),
    "llama-wide": lambda: LlamaForCausalLM(LlamaConfig(**WIDE)),
    "llama-rope-llama3": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=LLAMA31)),
    "llama-rope-linear": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=LINEAR)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=32, tie_word_embeddings=True)),
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_K_TYPES = {"Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210)}
"""Types that the package cannot quantise, and the bytes of a block with its float16 factors."""


def write(path: Path, name: str, kind: str) -> Family:
    """Write the model `name` with matrices of the type `kind`; the weights of the returned model are dequantised."""
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    family, config = name.partition("-")[0], model.config
    writer = GGUFWriter(path, family)
    _write_sizes(writer, model)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if key.endswith("norm.weight") else 0.0, 0.3)
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            turned = [n for part, n in heads.items() if f".{part}." in key and family == "llama"]
            stored, number, values = _stored(parameter.float().numpy(), kind, turned[0] if turned else 0)
            parameter.copy_(torch.from_numpy(values))
            writer.add_tensor(_file_name(key), stored, raw_dtype=number)
    if "llama3" in name:
        writer.add_tensor("rope_freqs.weight", _llama3_factors(model))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Family(model, path)


def _write_sizes(writer: GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_string(f"{writer.arch}.rope.scaling.type", "linear")
        writer.add_float32(f"{writer.arch}.rope.scaling.factor", rope["factor"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim != config.hidden_size // config.num_attention_heads:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"<{i}>" for i in range(config.vocab_size)])
    writer.add_eos_token_id(1)


def _file_name(key: str) -> str:
    stem, _, kind = key.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def _stored(
    values: NDArray[np.float32], kind: str, heads: int
) -> tuple[NDArray[np.generic], GGMLQuantizationType, NDArray[np.float32]]:
    """Return what is written, its type, and the values that it stands for in the order of transformers.

    Args:
        heads: of a projection whose rows the converter reorders; 0: the order stays.
    """
    number = GGMLQuantizationType["F32" if values.ndim == 1 else kind]
    rows = len(values)
    order = np.arange(rows)
    if heads:  # the converter's reordering, for one number per row
        order = order.reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(rows)
    turned = np.ascontiguousarray(values[order])
    if kind in _K_TYPES and values.ndim > 1:
        stored = _random_blocks(kind, turned.shape)
    else:
        stored = quantize(turned, number)
    read = dequantize(stored, number).reshape(values.shape)
    back = np.empty_like(read)
    back[order] = read
    return stored, number, back


def _random_blocks(kind: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    number = GGMLQuantizationType[kind]
    elements, size = GGML_QUANT_SIZES[number]
    generator = np.random.default_rng(shape[0])
    blocks = generator.integers(0, 256, (shape[0], shape[1] // elements, size), np.uint8)
    first, last = _K_TYPES[kind]
    factors = generator.uniform(1e-4, 4e-4, (*blocks.shape[:2], (last - first) // 2)).astype(np.float16)
    blocks[..., first:last] = factors.view(np.uint8)
    return blocks.reshape(shape[0], -1)


def _llama3_factors(model: PreTrainedModel) -> NDArray[np.float32]:
    """As the converter computes them."""
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    plain = 1.0 / 5000.0 ** (np.arange(0, head_dim, 2) / head_dim)
    scaled = model.model.rotary_emb.inv_freq.numpy()
    return (plain / scaled).astype(np.float32)
