"""Llama checkpoints with random weights, for measurements of time. They are made once, in build/bench/models."""

import json
import sysconfig
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

DIRECTORY = Path("build/bench/models")
VOCAB = 4096
SHAPES = {
    "m4": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    "m155": {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 8},
    "m135": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    },
}
"""Named after the number of parameters in millions. Heads have 64 dimensions; unless given, the MLP is three times as
wide as the model, and the vocabulary is `VOCAB`. m135 has the shape of SmolLM2-135M."""


def random_llama(name: str) -> Path:
    """Return the directory of the checkpoint, in Hugging Face format and bfloat16."""
    directory = DIRECTORY / name
    if (directory / "config.json").is_file():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    config = config_json(**{"intermediate_size": 3 * SHAPES[name]["hidden_size"], **SHAPES[name]})
    save_file(_weights(config), directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return directory


def named_model(name: str) -> Path:
    """Return the directory of a random model, or the path that `name` is."""
    return random_llama(name) if name in SHAPES else Path(name)


def config_json(**shape: object) -> dict[str, Any]:
    """Return the configuration of a Llama. `shape`: its sizes, and what differs from a model of `SHAPES`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **shape,
    }


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors by their names, those of a layer one after the other."""
    hidden, mlp, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        for part, shape in (
            ("self_attn.q_proj", (queries, hidden)),
            ("self_attn.k_proj", (keys, hidden)),
            ("self_attn.v_proj", (keys, hidden)),
            ("self_attn.o_proj", (hidden, queries)),
            ("mlp.gate_proj", (mlp, hidden)),
            ("mlp.up_proj", (mlp, hidden)),
            ("mlp.down_proj", (hidden, mlp)),
            ("input_layernorm", (hidden,)),
            ("post_attention_layernorm", (hidden,)),
        ):
            shapes[f"model.layers.{i}.{part}.weight"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    return shapes


def _weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: (0.02 * torch.randn(shape, generator=generator) if len(shape) == 2 else torch.ones(shape)).bfloat16()
        for name, shape in tensor_shapes(config).items()
    }


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and its configuration."""
    _tokenizer().save(str(directory / "tokenizer.json"))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))


def _tokenizer() -> Tokenizer:
    """Train a byte-level BPE on the sources of the standard library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:150]
    tokenizer.train(
        [str(file) for file in files],
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=["<|bos|>", "<|eos|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer
