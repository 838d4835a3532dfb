"""Tensor names of GGUF files and of Hugging Face checkpoints, for the architectures that are supported."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from services.checkpoint.errors import CheckpointError
from services.checkpoint.gguf.header import GgufHeader, GgufTensor

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies; part of the configuration in Hugging Face checkpoints."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""The same for the contexts of longrope."""
SINKS = "self_attn.sinks"
"""A tensor without the suffix `weight`."""
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
"""Tensors of all experts of a layer together, which become one for each expert."""
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_LLAMA4 = {
    f"ffn_{part}{suffix}": f"feed_forward.{block}{part}_proj"
    for suffix, block in {"": "", "_exps": "experts.{}.", "_shexp": "shared_expert."}.items()
    for part in ("gate", "up", "down")
}


class GgufArchitecture(NamedTuple):
    """The differences of an architecture's files from those of Llama."""

    hf: str
    """Class in `transformers`."""
    model_type: str
    """Name there of its configuration."""
    names: Mapping[str, str] = {}
    """Tensors of layers with other Hugging Face names."""
    reorders: bool = False
    """In the rows of query and key projections, the two halves of each head alternate."""
    norm_offset: float = 0.0
    """Added to the weights of norms by the converter."""
    stacks_experts: bool = False
    """In `transformers`, a tensor has all experts of a layer."""


_NORMED_OUTPUTS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("LlamaForCausalLM", "llama", reorders=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3"),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", "smollm3", reorders=True),
    "granite": GgufArchitecture("GraniteForCausalLM", "granite", reorders=True),
    "granitemoe": GgufArchitecture(
        "GraniteMoeForCausalLM",
        "granitemoe",
        {**_MIXTRAL_EXPERTS, "ffn_gate_inp": "block_sparse_moe.router.layer"},
        reorders=True,
        stacks_experts=True,
    ),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM", "olmo2", _NORMED_OUTPUTS),
    "olmoe": GgufArchitecture("OlmoeForCausalLM", "olmoe", _EXPERTS),
    "phi3": GgufArchitecture(
        "Phi3ForCausalLM", "phi3", {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    ),
    "gemma3": GgufArchitecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {**_NORMED_OUTPUTS, "ffn_norm": "pre_feedforward_layernorm"},
        norm_offset=1.0,
    ),
    "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM", "qwen3_moe", _EXPERTS),
    "gpt-oss": GgufArchitecture(
        "GptOssForCausalLM",
        "gpt_oss",
        {
            **_EXPERTS,
            "ffn_gate_inp": "mlp.router",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": SINKS,
        },
        stacks_experts=True,
    ),
    "llama4": GgufArchitecture(
        "Llama4ForCausalLM", "llama4_text", {**_LLAMA4, "ffn_gate_inp": "feed_forward.router"}, stacks_experts=True
    ),
}

MIXTRAL = GgufArchitecture("MixtralForCausalLM", "mixtral", _MIXTRAL_EXPERTS, reorders=True)


def architecture(header: GgufHeader) -> GgufArchitecture:
    """Return the architecture. Raises: CheckpointError, if it is not supported."""
    name = header.architecture
    if name == "llama" and header.integer("llama.expert_count", 0):
        return MIXTRAL
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.path}: architecture {name:.80} is not supported in GGUF files; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def tensors_by_name(header: GgufHeader) -> dict[str, GgufTensor]:
    """Return the tensors by their Hugging Face names, without the rotary factors.

    Raises: CheckpointError, if a tensor has no counterpart.
    """
    found: dict[str, GgufTensor] = {}
    for name, tensor in header.tensors.items():
        if name in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS):
            continue
        renamed = _renamed(header, name)
        if "{}" not in renamed:
            found[renamed] = tensor
            continue
        if len(tensor.shape) < 2:
            raise CheckpointError(f"{header.path}: tensor {name:.80} has no dimension of experts")
        number, *shape = tensor.shape
        for expert in range(number):
            begin = tensor.begin + expert * (tensor.size // number)
            found[renamed.format(expert)] = replace(tensor, shape=tuple(shape), begin=begin)
    return found


def _renamed(header: GgufHeader, name: str) -> str:
    match = _NAME.fullmatch(name)
    layer, part, kind = match.groups() if match else (None, "", "")
    known = (_WHOLE if layer is None else {**_LAYER, **architecture(header).names}).get(part)
    if known is None:
        raise CheckpointError(
            f"{header.path}: tensor {name:.80} is not supported with architecture {header.architecture}"
        )
    if known == SINKS:
        return f"model.layers.{int(layer or 0)}.{SINKS}"
    return f"{known}.{kind}" if layer is None else f"model.layers.{int(layer)}.{known}.{kind}"
