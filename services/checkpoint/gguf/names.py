"""Tensor names of GGUF files and of Hugging Face checkpoints, for the architectures that are supported."""

import re

from services.checkpoint.errors import CheckpointError
from services.checkpoint.gguf.header import GgufHeader, GgufTensor

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Class in `transformers` of each architecture that is supported."""
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies; part of the configuration in Hugging Face checkpoints."""
_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
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


def architecture(header: GgufHeader) -> str:
    """Return the architecture. Raises: CheckpointError, if it is not supported."""
    name = header.architecture
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.path}: architecture {name:.80} is not supported in GGUF files; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    return name


def tensors_by_name(header: GgufHeader) -> dict[str, GgufTensor]:
    """Return the tensors by their Hugging Face names, without the rotary factors.

    Raises: CheckpointError, if a tensor has no counterpart.
    """
    return {_renamed(header, name): t for name, t in header.tensors.items() if name != ROPE_FACTORS}


def _renamed(header: GgufHeader, name: str) -> str:
    match = _NAME.fullmatch(name)
    layer, part, kind = match.groups() if match else (None, "", "")
    known = (_WHOLE if layer is None else _LAYER).get(part)
    if known is None:
        raise CheckpointError(
            f"{header.path}: tensor {name:.80} is not supported with architecture {header.architecture}"
        )
    return f"{known}.{kind}" if layer is None else f"model.layers.{int(layer)}.{known}.{kind}"
