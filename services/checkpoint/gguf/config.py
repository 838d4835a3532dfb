"""config.json and generation_config.json from the metadata of a GGUF file."""

from collections.abc import Callable
from typing import Any

from services.checkpoint.errors import CheckpointError
from services.checkpoint.gguf.header import GgufHeader
from services.checkpoint.gguf.names import architecture
from services.checkpoint.gguf.rope import rope_scaling
from services.checkpoint.gguf.special_tokens import end_tokens, token_id

_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Recommended sampling parameters: `transformers` name and key below `general.sampling`."""
_STORED = {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}


def hf_config(header: GgufHeader) -> dict[str, Any]:
    """Return the content of config.json. Raises: CheckpointError, if the model is not supported."""
    kind, name = architecture(header), header.architecture
    heads, head_dim = _size(header, "attention.head_count"), head_size(header)
    theta = header.number(f"{name}.rope.freq_base", 10_000.0)
    _refuse_unsupported(header, head_dim)
    rotated = header.integer(f"{name}.rope.dimension_count", head_dim)
    plain = {
        "architectures": [kind.hf],
        "model_type": kind.model_type,
        "vocab_size": _vocab_size(header),
        "hidden_size": _size(header, "embedding_length"),
        "intermediate_size": _size(header, "feed_forward_length"),
        "num_hidden_layers": _size(header, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _size(header, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": _size(header, "context_length"),
        "rms_norm_eps": _rounded(header.number(f"{name}.attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "is_causal": header.flag(f"{name}.attention.causal", True),
        "rope_theta": theta,
        "rope_parameters": rope_scaling(header, rotated, theta) or {},
        "partial_rotary_factor": rotated / head_dim,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": name == "qwen2" or "blk.0.attn_output.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
        "bos_token_id": token_id(header, "bos"),
        "eos_token_id": token_id(header, "eos"),
        "pad_token_id": token_id(header, "pad"),
        "dtype": _dtype(header),
    }
    experts = _experts(header) if "ffn_gate_exps" in kind.names else {}
    return {**plain, **experts, **(_OTHER[name](header) if name in _OTHER else {})}


def _granite(header: GgufHeader) -> dict[str, Any]:
    keys = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    given = {ours: header.metadata.get(f"{header.architecture}.{key}") for ours, key in keys.items()}
    multipliers = {name: _rounded(v) for name, v in given.items() if isinstance(v, int | float) and v}
    return {"attention_multiplier": head_size(header) ** -0.5, **multipliers}


def _gemma3(header: GgufHeader) -> dict[str, Any]:
    """The file has no pattern of layers and no base of layers with a window; they are those of all published models.
    Scores are scaled by the size of heads, except in the model of 27 billion parameters."""
    heads, hidden = _size(header, "attention.head_count"), _size(header, "embedding_length")
    head_dim = head_size(header)
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if header.number(f"gemma3.{key}", 0.0):
            raise CheckpointError(f"{header.path}: gemma3.{key} is not supported")
    theta, local = header.number("gemma3.rope.freq_base", 1e6), header.number("gemma3.rope.freq_base_swa", 1e4)
    full = rope_scaling(header, head_dim, theta) or {"rope_type": "default"}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": _size(header, "attention.sliding_window"),
        "sliding_window_pattern": header.integer("gemma3.attention.sliding_window_pattern", 6),
        "rope_parameters": {
            "full_attention": {**full, "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "query_pre_attn_scalar": hidden // heads if _size(header, "block_count") == 62 else head_dim,
    }


def _phi3(header: GgufHeader) -> dict[str, Any]:
    window = header.integer("phi3.attention.sliding_window", 0)
    original = header.integer("phi3.rope.scaling.original_context_length", _size(header, "context_length"))
    return {"sliding_window": window or None, "original_max_position_embeddings": original}


def _experts(header: GgufHeader) -> dict[str, Any]:
    return {
        "num_local_experts": _size(header, "expert_count"),
        "num_experts_per_tok": _size(header, "expert_used_count"),
        "norm_topk_prob": header.architecture != "olmoe",
        "moe_intermediate_size": _expert_size(header),
    }


def _expert_size(header: GgufHeader) -> int:
    return _size(header, "expert_feed_forward_length", _size(header, "feed_forward_length"))


def _gpt_oss(header: GgufHeader) -> dict[str, Any]:
    return {
        "intermediate_size": _expert_size(header),
        "sliding_window": _size(header, "attention.sliding_window"),
        "rope_theta": header.number("gpt-oss.rope.freq_base", 150_000.0),
    }


def _llama4(header: GgufHeader) -> dict[str, Any]:
    """The file names neither layers without positions nor the temperature; they are those of all published models.
    The one with 128 experts has no norms of queries and keys."""
    return {
        "intermediate_size": _expert_size(header),
        "intermediate_size_mlp": _size(header, "feed_forward_length"),
        "interleave_moe_layer_step": _size(header, "interleave_moe_layer_step"),
        "use_qk_norm": _size(header, "expert_count") != 128,
        "attention_chunk_size": _size(header, "attention.sliding_window", 8192),
    }


_OTHER: dict[str, Callable[[GgufHeader], dict[str, Any]]] = {
    "granite": _granite, "granitemoe": _granite, "gemma3": _gemma3, "phi3": _phi3, "gpt-oss": _gpt_oss,
    "llama4": _llama4,
}  # fmt: skip
"""Keys of config.json that only some architectures have."""


def generation_config(header: GgufHeader) -> dict[str, Any]:
    """Return the content of generation_config.json: the tokens that end an answer, and sampling parameters."""
    given = {ours: header.metadata.get(f"general.sampling.{key}") for ours, key in _SAMPLING.items()}
    sampling = {name: _rounded(v) for name, v in given.items() if isinstance(v, int | float)}
    ids = {"bos_token_id": token_id(header, "bos"), "eos_token_id": list(end_tokens(header))}
    return {**ids, **({"do_sample": True} if sampling else {}), **sampling}


def head_size(header: GgufHeader) -> int:
    """Return the dimensions of a head of queries and keys. Raises: CheckpointError"""
    shared = _size(header, "embedding_length") // _size(header, "attention.head_count")
    return _size(header, "attention.key_length", shared)


def _size(header: GgufHeader, key: str, default: int | None = None) -> int:
    """Return a size of at least 1; an array is allowed if all layers have the same size."""
    key = f"{header.architecture}.{key}"
    if not isinstance(header.metadata.get(key, 0), int):
        values = set(header.numbers(key))
        if len(values) != 1:
            raise CheckpointError(f"{header.path}: {key} differs between layers, which is not supported")
        default = values.pop()
    else:
        default = header.integer(key, default)
    if not isinstance(default, int) or not 1 <= default < 2**31:
        raise CheckpointError(f"{header.path}: {key} must be at least 1, it is {default!r:.80}")
    return default


def _vocab_size(header: GgufHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{header.path} has no tensor token_embd.weight; convert the model again")
    return embedding.shape[0]


def _refuse_unsupported(header: GgufHeader, head_dim: int) -> None:
    at = header.architecture + "."
    if header.integer(at + "expert_count", 0) and "ffn_gate_exps" not in architecture(header).names:
        raise CheckpointError(
            f"{header.path}: mixtures of experts are not supported with architecture {header.architecture}"
        )
    if header.integer("split.count", 1) > 1:
        raise CheckpointError(
            f"{header.path} is one of {header.integer('split.count')} parts, which is not supported; "
            "merge them with `llama-gguf-split --merge` first"
        )
    context = header.integer(at + "context_length")
    is_windowed = 0 < header.integer(at + "attention.sliding_window", 0) < context
    if is_windowed and header.architecture not in ("gemma3", "phi3", "gpt-oss", "llama4"):
        raise CheckpointError(
            f"{header.path}: attention with a sliding window is not supported with architecture {header.architecture}"
        )
    partial = ("rope.dimension_count",) if header.architecture != "phi3" else ()
    for key in ("attention.value_length", *partial):
        if (size := header.integer(at + key, head_dim)) != head_dim:
            raise CheckpointError(f"{header.path}: {at}{key} {size} is not supported; it must be {head_dim}")


def _dtype(header: GgufHeader) -> str:
    """Return the stored type; bfloat16 for quantised weights, whose type does not determine that of the computation."""
    stored = {t.type.name for t in header.tensors.values() if len(t.shape) > 1}
    return _STORED.get(frozenset(stored), "bfloat16")


def _rounded(value: float) -> float:
    """Return the shortest decimal number that float32 rounds to the same value: 1e-05 for 9.999999747378752e-06."""
    return value if isinstance(value, int) else float(f"{value:.7g}")
