"""config.json from the metadata of a GGUF file: values that it leaves out, and models that are refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.checkpoint import CheckpointError
from services.checkpoint.gguf import GgufHeader, GgufTensor
from services.checkpoint.gguf.config import generation_config, hf_config
from services.checkpoint.gguf.rope import rope_scaling
from services.checkpoint.gguf.tensor_types import TENSOR_TYPES

PLAIN = {
    "embedding_length": 64, "feed_forward_length": 96, "block_count": 2, "attention.head_count": 4,
    "context_length": 256, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
WINDOW = {"attention.sliding_window": 8}
EXPERTS = {"expert_count": 4, "expert_used_count": 2}
LLAMA4 = {**EXPERTS, "interleave_moe_layer_step": 2}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def config(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Both files of an architecture with these values; a key with two dots at its beginning has no architecture."""
    own = {key[2:] if key.startswith("..") else f"{name}.{key}": value for key, value in (PLAIN | values).items()}
    table = GgufTensor("token_embd.weight", (260, 64), TENSOR_TYPES[1], 0)
    header = GgufHeader(Path("m.gguf"), {"general.architecture": name, **own}, {table.name: table})
    return hf_config(header) | generation_config(header)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("llama", {}, {"rope_theta": 1e4, "num_key_value_heads": 4, "head_dim": 16, "dtype": "float16"}),
        ("llama", {}, {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "is_causal": True}),
        ("llama", {"attention.causal": False}, {"is_causal": False}),
        ("llama", {"rope.scale_linear": 2.0}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
        ("llama", {"attention.sliding_window": 256}, {}),  # no shorter than the context
        ("llama", {"..tokenizer.ggml.pad_token_id": 2**32 - 1}, {"pad_token_id": None}),
        ("llama", {"..general.sampling.min_p": 0.25}, {"do_sample": True, "min_p": 0.25}),
        ("qwen2", {}, {"attention_bias": True}),
        ("granite", {"attention.scale": 0.0}, {"attention_multiplier": 0.25}),
        ("phi3", {}, {"sliding_window": None, "original_max_position_embeddings": 256}),
        ("gemma3", WINDOW, {"sliding_window_pattern": 6, "query_pre_attn_scalar": 16}),
        ("gemma3", {**WINDOW, "block_count": 62, "attention.key_length": 32}, {"query_pre_attn_scalar": 16}),
        ("olmoe", EXPERTS, {"norm_topk_prob": False, "moe_intermediate_size": 96}),
        ("gpt-oss", {**WINDOW, **EXPERTS}, {"rope_theta": 150_000.0}),
        ("llama4", LLAMA4, {"use_qk_norm": True, "attention_chunk_size": 8192}),
        ("llama4", {**LLAMA4, **WINDOW, "expert_count": 128}, {"use_qk_norm": False, "attention_chunk_size": 8}),
        ("qwen3", {**YARN, "rope.scaling.yarn_beta_fast": 16.0}, {"rope_parameters": {**YARN_ROPE, "beta_fast": 16.0}}),
    ],
)  # fmt: skip
def test_values_that_a_file_gives_or_leaves_out(name: str, values: dict[str, Any], expected: dict[str, Any]) -> None:
    found = config(name, values)
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("rwkv", {}, "architecture rwkv is not supported in GGUF files; supported are llama"),
        ("llama", {"block_count": 0}, "llama.block_count must be at least 1, it is 0"),
        ("llama", {"block_count": True}, "llama.block_count must be a whole number, it is True"),
        ("llama", {"attention.value_length": 8}, "llama.attention.value_length 8 is not supported; it must be 16"),
        ("llama", {"rope.dimension_count": 8}, "llama.rope.dimension_count 8 is not supported; it must be 16"),
        ("llama", {"..split.count": 3}, "is one of 3 parts, which is not supported; merge them"),
        ("llama", WINDOW, "attention with a sliding window is not supported with architecture llama"),
        ("qwen2", {"expert_count": 4}, "mixtures of experts are not supported with architecture qwen2"),
        ("gemma3", {**WINDOW, "attn_logit_softcapping": 50.0}, "gemma3.attn_logit_softcapping is not supported"),
        ("llama", {"..tokenizer.ggml.bos_token_id": 1, "..tokenizer.ggml.tokens": ["a"]}, "1 is not among the 1 token"),
        ("llama", {"rope.scaling.type": "linear", "rope.scaling.attn_factor": 1.5}, "attn_factor 1.5 is not supported"),
        ("llama", {**YARN, "rope.scaling.yarn_attn_factor": 1.5}, "yarn_attn_factor 1.5 is not supported"),
        ("llama", {**YARN, "rope.scaling.yarn_ext_factor": 1.5}, "yarn_ext_factor 1.5 is not supported"),
        ("llama", {"rope.scaling.type": "ntk"}, "rotary scaling 'ntk' with the factor 1.0 is not supported"),
    ],
)
def test_models_that_are_refused(name: str, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        config(name, values)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(0, "the values of rope_freqs.weight are not those of Llama"), (1, r"is F16 \[8\], not F32 \[8\]")],
)
def test_rotary_factors_of_another_kind_or_type_are_refused(kind: int, reason: str, tmp_path: Path) -> None:
    (file := tmp_path / "m.gguf").write_bytes(np.arange(1, 9, dtype="<f4").tobytes())
    tensor = GgufTensor("rope_freqs.weight", (8,), TENSOR_TYPES[kind], 0)
    with pytest.raises(CheckpointError, match=reason):
        rope_scaling(GgufHeader(file, {"general.architecture": "llama"}, {tensor.name: tensor}), 16, 1e4)
