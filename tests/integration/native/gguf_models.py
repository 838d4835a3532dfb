"""Tiny models as GGUF files, written with the `gguf` package, and their counterparts in transformers."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, RopeScalingType, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tests.integration.native.conftest import LONGROPE, MULTIPLIERS, TOKENS, YARN, Family
from tests.random_models import random_model

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
WIDE = {**SMALL, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "initializer_range": 0.1}
"""For types with blocks of 256 elements."""
LLAMA31 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": partial(random_model, "llama", **SMALL, tie_word_embeddings=True),
    "llama-biased": partial(random_model, "llama", **SMALL, attention_bias=True, mlp_bias=True, head_dim=24),
    "llama-wide": partial(random_model, "llama", **WIDE),
    "llama-rope-llama3": partial(random_model, "llama", **SMALL, rope_parameters=LLAMA31),
    "llama-rope-linear": partial(random_model, "llama", **SMALL, rope_parameters=LINEAR),
    "qwen2": partial(random_model, "qwen2", **SMALL),
    "qwen3": partial(random_model, "qwen3", **SMALL, head_dim=32, tie_word_embeddings=True),
    "smollm3": partial(random_model, "smollm3", **{**SMALL, "num_hidden_layers": 4}, **TOKENS),
    "granite": partial(random_model, "granite", **SMALL, **MULTIPLIERS),
    "granitemoe": partial(
        random_model, "granitemoe", **SMALL, **MULTIPLIERS, num_local_experts=4, num_experts_per_tok=2,
    ),
    "olmo2": partial(random_model, "olmo2", **SMALL, **TOKENS),
    "olmoe": partial(random_model, "olmoe", **SMALL, **TOKENS, num_experts=4, num_experts_per_tok=2),
    "mixtral": partial(random_model, "mixtral", **SMALL, num_local_experts=4, num_experts_per_tok=2),
    "phi3": partial(
        random_model, "phi3", **SMALL, **TOKENS, sliding_window=7, original_max_position_embeddings=256,
        rope_parameters={**LONGROPE, "attention_factor": 1.25, "partial_rotary_factor": 0.75},
    ),
    "gemma3": partial(
        random_model, "gemma3_text", **{**SMALL, "initializer_range": 0.3, "num_hidden_layers": 7}, **TOKENS,
        head_dim=32, sliding_window=7, query_pre_attn_scalar=32,
        rope_parameters={
            "full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "qwen3moe": partial(
        random_model, "qwen3_moe", **SMALL, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
    "gpt-oss": partial(
        random_model, "gpt_oss", **SMALL, **TOKENS, head_dim=32, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=7, rope_parameters={**YARN, "truncate": False},
    ),
    "llama4": partial(
        random_model, "llama4_text", **{**SMALL, "intermediate_size": 32, "num_hidden_layers": 4}, **TOKENS,
        head_dim=16, intermediate_size_mlp=96, num_local_experts=4, num_experts_per_tok=2, interleave_moe_layer_step=2,
        rope_parameters={**LLAMA31, "rope_theta": 2e5, "factor": 16.0, "high_freq_factor": 1.0},
    ),
}  # fmt: skip
_ORIGINAL = {"phi3": 256, "gpt-oss": 32}
"""Positions before rotary scaling."""
_REORDERED = ("llama", "smollm3", "granite", "granitemoe")
"""Families whose converter reorders the rows of queries and keys."""
_RANDOM = ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
"""Types that the package cannot quantise. Their blocks are random."""


def write(path: Path, name: str, kind: str) -> Family:
    """Write the model `name` with matrices of the type `kind`; the weights of the returned model are dequantised."""
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    family = {"gpt-oss": name, "mixtral": "llama"}.get(name, name.partition("-")[0])
    config = model.config
    writer = GGUFWriter(path, family)
    _write_sizes(writer, model)
    arch = next(arch for arch, own in MODEL_ARCH_NAMES.items() if own == family)
    known = get_tensor_name_map(arch, config.num_hidden_layers)
    with torch.no_grad():
        for key, parameter in _tensors(model):
            if parameter.ndim == 1 and not key.endswith("sinks"):
                parameter.normal_(1.0 if key.endswith("norm.weight") else 0.0, 0.3)
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            turned = [n for part, n in heads.items() if f".{part}." in key and family in _REORDERED]
            number = "F32" if "router" in key or "mlp.gate." in key or key.endswith("bias") else kind
            stored, number, values = _stored(parameter.float().numpy(), number, turned[0] if turned else 0)
            parameter.copy_(torch.from_numpy(values))
            offset = family == "gemma3" and key.endswith("norm.weight")
            file_name = known.get_name(
                re.sub(r"(mlp|block_sparse_moe)\.router\.", "mlp.gate.", key), (".weight", ".bias")
            )
            assert file_name is not None, key
            file_name += ".weight" if key.endswith("sinks") else ""
            writer.add_tensor(file_name, stored + 1 if offset else stored, raw_dtype=number)
    if family == "phi3":
        for part in ("long", "short"):
            factors = np.array(LONGROPE[f"{part}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{part}.weight", factors)
    if "llama3" in name or family == "llama4":
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
    writer.add_feed_forward_length(getattr(config, "intermediate_size_mlp", config.intermediate_size))
    writer.add_head_count(config.num_attention_heads)
    kv_heads, layers = config.num_key_value_heads, config.num_hidden_layers
    writer.add_head_count_kv([kv_heads] * layers if writer.arch == "granite" else kv_heads)  # as of Granite 4
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if multiplier := getattr(config, "embedding_multiplier", None):
        writer.add_embedding_scale(multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    if number := getattr(config, "num_local_experts", None):
        writer.add_expert_count(number)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if writer.arch == "llama4":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        writer.add_rope_dimension_count(12)
    if original := _ORIGINAL.get(writer.arch):
        writer.add_rope_scaling_orig_ctx_len(original)
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


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters, and those of experts as views with gate and up apart."""
    for key, parameter in model.named_parameters():
        prefix, _, part = re.sub("block_sparse_moe|feed_forward", "mlp", key).rpartition("mlp.experts.")
        if not prefix:
            yield key, parameter
            continue
        of, kind = model.config.model_type, "bias" if part.endswith("bias") else "weight"
        alternates, turned = of == "gpt_oss", of in ("gpt_oss", "llama4_text")
        values = parameter.transpose(1, 2) if turned and kind == "weight" else parameter
        if part.startswith("down"):
            yield f"{prefix}mlp.experts.down_proj.{kind}", values
            continue
        width = values.shape[1] // 2
        gate = values[:, 0::2] if alternates else values[:, :width]
        up = values[:, 1::2] if alternates else values[:, width:]
        yield f"{prefix}mlp.experts.gate_proj.{kind}", gate
        yield f"{prefix}mlp.experts.up_proj.{kind}", up


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
    if kind in _RANDOM and values.ndim > 1:
        stored = random_blocks(kind, turned.shape)
    else:
        stored = quantize(turned, number)
    read = dequantize(stored, number).reshape(values.shape)
    back = np.empty_like(read)
    back[order] = read
    return stored, number, back


def random_blocks(kind: str, shape: tuple[int, ...], size: float = 0.05) -> NDArray[np.uint8]:
    """Return random codes with weights of about `size`: [rows, bytes of a row]."""
    # Loads numba, which vLLM 0.32 does not survive if it is there before vLLM's own start
    from services.worker.kernels.cpu.compiled.block_formats import FORMATS

    number, halves = GGMLQuantizationType[kind], FORMATS[kind].halves
    elements, block_bytes = GGML_QUANT_SIZES[number]
    generator = np.random.default_rng(shape[0])
    blocks = generator.integers(0, 256, (shape[0], shape[1] // elements, block_bytes), np.uint8)
    if FORMATS[kind].has_exponents:
        blocks[..., 0] = generator.integers(120, 124, blocks.shape[:2])
    for first in halves:
        blocks[..., first : first + 2] = np.array([1.0], np.float16).view(np.uint8)
    unit = size / dequantize(blocks.reshape(shape[0], -1), number).std()
    for first in halves:
        factors = unit * generator.uniform(0.5, 1.5, blocks.shape[:2])
        blocks[..., first : first + 2] = factors.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def _llama3_factors(model: PreTrainedModel) -> NDArray[np.float32]:
    """As the converter computes them."""
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    plain = 1.0 / model.config.rope_parameters["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    scaled = model.model.rotary_emb.inv_freq.numpy()
    return (plain / scaled).astype(np.float32)
