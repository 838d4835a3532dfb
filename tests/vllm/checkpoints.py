"""Tiny random checkpoints of architectures that vLLM supports, in Hugging Face format with the demo model's tokenizer.

The weights are so large (`initializer_range`) that the likeliest token leads by far more than rounding errors.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from services.checkpoint import DEMO_MODEL
from tests.random_models import random_model

VOCAB = 4096
"""Size of the demo model's vocabulary."""
CONTEXT = 512
"""Context length in tokens."""
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    **SPECIAL,
}
"""vLLM's CPU kernels require heads of at least 32 dimensions."""

STATES = SMALL | {
    "num_key_value_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 64,
}
"""A recurrent state is not larger than a block of 32 tokens."""

MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": partial(random_model, "llama", **SMALL),
    "qwen3": partial(random_model, "qwen3", **SMALL, head_dim=32),
    "gemma": partial(random_model, "gemma", **SMALL, head_dim=32),
    "gemma3": partial(
        random_model, "gemma3_text",
        **SMALL | {"num_hidden_layers": 3}, head_dim=32, sliding_window=40, query_pre_attn_scalar=32,
        tie_word_embeddings=False,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "mistral-window": partial(random_model, "mistral", **SMALL, sliding_window=40),
    "gpt-oss": partial(
        random_model, "gpt_oss",
        **SMALL | {"hidden_size": 128, "intermediate_size": 128}, head_dim=32, sliding_window=40,
        num_local_experts=4, num_experts_per_tok=2,
    ),
    "granite-hybrid": partial(
        random_model, "granitemoehybrid",
        **STATES | {"num_hidden_layers": 4}, layer_types=["mamba", "mamba", "attention", "mamba"],
        num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=192, position_embedding_type="nope",
    ),
    "falcon-h1": partial(random_model, "falcon_h1", **STATES, head_dim=32, mamba_d_ssm=256),
    "phi": partial(random_model, "phi", **SMALL, partial_rotary_factor=0.5),
    "gpt2": partial(
        random_model, "gpt2",
        vocab_size=VOCAB, n_positions=CONTEXT, n_embd=128, n_layer=2, n_head=4, initializer_range=0.2, **SPECIAL
    ),
    "qwen2-moe": partial(
        random_model, "qwen2_moe", **SMALL,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=96,
        num_experts=4,
        num_experts_per_tok=2,
    ),
}  # fmt: skip
INT8 = "llama-int8"
"""In compressed-tensors' format. vLLM's CPU build supports GPTQ with AVX-512 only, and FP8 with AMX only."""


def make(name: str, directory: Path) -> Path:
    """Write the checkpoint `name`, of `MAKERS` or `INT8`, to the new `directory`. Returns the directory."""
    torch.manual_seed(7)
    model = MAKERS[name.removesuffix("-int8")]().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # biases and norms other than 0 and 1
            mean = 1.0 if "norm" in parameter_name or "ln_" in parameter_name else 0.0
            torch.nn.init.normal_(parameter, mean=mean if parameter_name.endswith("weight") else 0.0, std=0.3)
    if name == INT8:
        _save_int8(model, directory)
    else:
        model.save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(DEMO_MODEL / file, directory)
    return directory


def _save_int8(model: PreTrainedModel, directory: Path) -> None:
    """Write the layers' matrices in eight bits with one scale per output; activations are quantised at run time."""
    linear = {f"{name}.weight" for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    linear.discard("lm_head.weight")
    state: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        if name in linear:
            scale = weight.abs().amax(1, keepdim=True) / 127
            state[f"{name}_scale"] = scale
            weight = (weight / scale).round().to(torch.int8)
        state[name] = weight
    model.save_pretrained(directory, state_dict=state)
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**eight, "strategy": "channel", "dynamic": False},
                "input_activations": {**eight, "strategy": "token", "dynamic": True},
            }
        },
    }
    (directory / "config.json").write_text(json.dumps(config))


def make_eagle(directory: Path) -> Path:
    """Write the demo model's EAGLE head with the model's whole vocabulary, as vLLM reads it, to the new `directory`.
    Returns the directory."""
    directory.mkdir()
    head = load_file(DEMO_MODEL / "eagle" / "model.safetensors")
    save_file({name: tensor for name, tensor in head.items() if name != "d2t"}, directory / "model.safetensors")
    config = json.loads((DEMO_MODEL / "eagle" / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"draft_vocab_size": VOCAB}))
    return directory


def make_adapter(
    directory: Path, base: Path, seed: int, rank: int = 4, layers: str = "model.layers", **others: tuple[int, int]
) -> Path:
    """Write a random LoRA adapter in PEFT's format for the head, and for attention and gate of every layer, of a
    Llama-like checkpoint, to the new `directory`. Returns the directory.

    Args:
        others: inputs and outputs of further modules.
    """
    directory.mkdir()
    of_base = json.loads((base / "config.json").read_text())
    of_base = of_base.get("text_config", of_base)
    hidden, heads, groups = (of_base[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    width = of_base.get("head_dim") or hidden // heads
    sizes = {
        "self_attn.q_proj": (hidden, heads * width),
        "self_attn.v_proj": (hidden, groups * width),
        "mlp.gate_proj": (hidden, of_base["intermediate_size"]),
    }
    numbers = range(of_base["num_hidden_layers"])
    modules = {f"{layers}.{layer}.{name}": size for layer in numbers for name, size in sizes.items()} | others
    if layers == "model.layers":
        modules["lm_head"] = hidden, of_base["vocab_size"]
    random, tensors = torch.Generator().manual_seed(seed), {}
    for name, (inputs, outputs) in modules.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=random) * 0.3
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * 0.3
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "task_type": "CAUSAL_LM",
        "target_modules": sorted({name.split(".")[-1] for name in modules}), "base_model_name_or_path": str(base),
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
