"""A model that cannot be served ends in one line that says what is wrong and what to do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.checkpoint import CheckpointError
from services.worker.backends.native.model.config import ModelConfig
from services.worker.runner import LoadError
from tests.integration.native.conftest import Family
from tests.integration.native.driver import RunnerDriver
from tests.random_models import edit_config, edit_tensors


@pytest.fixture
def copy(llama: Family, tmp_path: Path) -> Path:
    """A checkpoint to break."""
    return Path(shutil.copytree(llama.path, tmp_path / "model"))


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises((CheckpointError, LoadError)) as caught:
        RunnerDriver(path, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM is not supported; the native backend computes"),
        ({"architectures": None}, "names no architecture"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights (gptq)"),
        ({"vision_config": {"depth": 2}}, "multimodal models (vision_config)"),
        ({"audio_config": {}}, "multimodal models (audio_config)"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"hidden_act": ["gelu"]}, "activation ['gelu']"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "default", "attention_factor": "1"}}, "'attention_factor' must be a number"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.1}}, "partial_rotary_factor 0.1"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "'partial_rotary_factor' is not"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2]}}, "8 short and long"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'factor' must be a number above 0, it is None"),
        ({"num_attention_heads": "four"}, "'num_attention_heads' must be a whole number"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"is_causal": False}, "'is_causal' False is not supported"),
        ({"vocab_size": None}, "'vocab_size' must be a whole number"),
        ({"intermediate_size": 96}, "mlp.gate_proj.weight is [104, 64], but config.json says [96, 64]"),
        ({"num_hidden_layers": 4}, "no tensor model.layers.3."),
        ({"num_hidden_layers": 2}, "more layers than the 2 of config.json"),
        ({"tie_word_embeddings": False}, "no tensor lm_head.weight"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)  # fmt: skip
def test_config_that_cannot_be_computed(copy: Path, changes: dict[str, Any], said: str) -> None:
    edit_config(copy, **changes)
    assert said in refusal(copy)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("llama-untied-biased", {"attention_bias": False}, "self_attn.q_proj.bias, but config.json describes"),
        ("llama-untied-biased", {"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
        ("qwen3", {"architectures": ["LlamaForCausalLM"]}, "self_attn.q_norm.weight, but config.json describes"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' 50.0 is not supported"),
        ("gpt-oss", {"layer_types": ["full_attention"]}, "layer_types must name full_attention or sliding_attention"),
        ("gpt-oss", {"layer_types": [[]] * 3}, "layer_types must name full_attention or sliding_attention for each"),
        ("qwen3-moe", {"decoder_sparse_step": 2}, "'decoder_sparse_step' 2 is not supported"),
        ("qwen3-moe", {"num_experts_per_tok": 7}, "'num_experts_per_tok' 7 is above the number of experts, 6"),
        ("llama4", {"moe_layers": [1, 3]}, "moe_layers must name some of the layers 0 to 2, it is [1, 3]"),
        ("llama4", {"moe_layers": [2]}, "no tensor model.layers.1.feed_forward.gate_proj.weight"),
        ("llama4", {"intermediate_size_mlp": 96}, "gate_proj.weight is [104, 64], but config.json says [96, 64]"),
        ("llama4", {"no_rope_layers": [1]}, "no_rope_layers must name 0 or 1 for each of 3 layers"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_config_that_contradicts_its_tensors(
    make_family: Callable[[str], Family], tmp_path: Path, name: str, changes: dict[str, Any], said: str
) -> None:
    path = Path(shutil.copytree(make_family(name).path, tmp_path / "model"))
    edit_config(path, **changes)
    assert said in refusal(path)


def without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def without_shard(model: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../secret.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def without_key(model: Path) -> None:
    edit_tensors(model, lambda weights: weights.pop("model.layers.1.self_attn.k_proj.weight"))


def with_integers(model: Path) -> None:
    edit_tensors(model, lambda weights: weights.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (shutil.rmtree, "no such model directory"),
        (lambda model: (model / "config.json").unlink(), "config.json is missing"),
        (lambda model: (model / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda model: (model / "adapter_config.json").write_text("{}"), "LoRA adapter"),
        (lambda model: (model / "config.json").rename(model / "adapter_config.json"), "LoRA adapter"),
        (lambda model: (model / "model.safetensors").rename(model / "model.bin"), "files; convert its .bin files"),
        (without_weights, "no safetensors files; download the model again"),
        (without_shard, "has no ../secret.safetensors"),
        (without_key, "no tensor model.layers.1.self_attn.k_proj.weight"),
        (with_integers, "tensor model.norm.weight is I8; quantised weights"),
    ],
)
def test_files_that_are_missing_or_wrong(copy: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(copy)
    assert said in refusal(copy)


@pytest.mark.parametrize("keep", [0, 5, 4000, -100])
def test_cut_file(copy: Path, keep: int) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "is not a valid safetensors file" in refusal(copy)


def test_missing_shard(make_family: Callable[[str], Family], tmp_path: Path) -> None:
    path = Path(shutil.copytree(make_family("qwen2").path, tmp_path / "model"))
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"has no {shard.name}, which its index names" in refusal(path)


def test_context_longer_than_the_model(copy: Path) -> None:
    assert "max_model_len 300 is more than the 256 positions" in refusal(copy, max_model_len=300)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_chunk_size": 20},
        {"floor_scale": 21, "no_rope_layers": [], "no_rope_layer_interval": 2},
        {"attention_chunk_size": 30, "floor_scale": 21},
    ],
    ids=str,
)
@torch.no_grad()
def test_the_context_of_llama4_ends_before_its_attention_changes(
    make_family: Callable[[str], Family], tmp_path: Path, changes: dict[str, Any]
) -> None:
    family, ids = make_family("llama4"), torch.arange(3, 43)[None]
    path = Path(shutil.copytree(family.path, tmp_path / "model"))
    edit_config(path, **changes)
    whole = AutoModelForCausalLM.from_pretrained(path)(ids).logits[0]
    differences = (whole - family.model(ids).logits[0]).abs().amax(1)
    assert differences[:20].max() < 1e-4 < differences[20]
    assert ModelConfig.from_checkpoint(path).max_position == 20
    text = refusal(path, max_model_len=21)
    assert "21 is more than the 20 positions before attention_chunk_size and floor_scale change the attention" in text
    edit_config(path, no_rope_layers=[1] * 3, layer_types=["full_attention"] * 3)  # it never changes
    assert ModelConfig.from_checkpoint(path).max_position == 256


def test_cache_too_small_for_a_block(copy: Path) -> None:
    assert "raise --kv-cache-memory-bytes" in refusal(copy, kv_cache_memory_bytes=1000)


def test_no_code_of_a_checkpoint_runs(copy: Path, tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    (copy / "modeling_evil.py").write_text(f"open({str(canary)!r}, 'w')")
    edit_config(copy, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    RunnerDriver(copy)
    assert not canary.exists()
