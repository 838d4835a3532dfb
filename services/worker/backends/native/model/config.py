"""A checkpoint's config.json, checked. Models that this backend cannot compute are refused by name."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.checkpoint import CheckpointError, read_json
from services.worker.runner import LoadError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. Only scalings that do not depend on the length of the sequence are supported."""

    theta: float
    kind: str
    """"default", "linear" or "llama3"."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: pre-norm, rotary positions, grouped-query attention, gated MLP with SiLU."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    tied: bool
    rope: Rope
    windows: tuple[int, ...]
    """Number of keys that a query reads, by layer, its own included; 0: all."""
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str
    """dtype of the checkpoint, for `--dtype auto`; other dtypes are read as float32."""

    @classmethod
    def from_checkpoint(cls, path: Path, architectures: Mapping[str, str] = ARCHITECTURES) -> "ModelConfig":
        """Read the configuration of a directory or of a GGUF file.

        Raises: LoadError, when config.json is missing or broken, or its model is not supported.
        """
        return _parse(ConfigReader(read_config(path)), path, architectures)


class ConfigReader:
    """Typed access to the raw JSON. Errors name the key and its value."""

    def __init__(self, raw: dict[str, Any], where: str = "config.json") -> None:
        self.raw, self.where = raw, where

    def size(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LoadError(f"{self.where}: {key!r} must be a whole number of at least 1, it is {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise LoadError(f"{self.where}: {key!r} must be a number above 0, it is {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise LoadError(f"{self.where}: {key!r} must be true or false, it is {value!r}")
        return bool(value)


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of config.json. Raises: LoadError"""
    try:
        raw = read_json(path, "config.json")
    except CheckpointError as error:
        raise LoadError(str(error)) from error
    if raw:
        return raw
    if (path / "adapter_config.json").is_file():
        raise LoadError(
            f"{path} is a LoRA adapter; adapters are not served, merge it into its base model first"
        )
    raise LoadError(f"{path / 'config.json'} is missing; give a model directory in Hugging Face format")


def _family(raw: dict[str, Any], architectures: Mapping[str, str]) -> str:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    works = ", ".join(architectures)
    if name is None:
        raise LoadError(f"config.json names no architecture; the native backend computes {works}")
    if name not in architectures:
        raise LoadError(
            f"architecture {name} is not supported; the native backend computes {works}; try --backend vllm "
            "(docs/vllm.md)"
        )
    return architectures[name]


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    if raw.get("quantization_config") is not None:
        method = raw["quantization_config"]
        method = method.get("quant_method", "quantised") if isinstance(method, dict) else "quantised"
        raise LoadError(
            f"quantised weights ({method}) are not supported; use the checkpoint in bfloat16 or float32"
        )
    for key in ("vision_config", "audio_config"):
        if raw.get(key) is not None:
            raise LoadError(f"multimodal models ({key}) are not supported; use the text-only checkpoint")
    act = raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise LoadError(f"activation {act!r} is not supported; the native backend computes silu")


def _parse(config: ConfigReader, path: Path, architectures: Mapping[str, str]) -> ModelConfig:
    raw = config.raw
    _refuse_unsupported(raw)
    family = _family(raw, architectures)
    if (path / "adapter_config.json").is_file():
        raise LoadError(
            f"{path} holds a LoRA adapter; adapters are not served, merge it into its base model first"
        )
    heads, hidden, layers = (
        config.size(k) for k in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    kv_heads = config.size("num_key_value_heads", {"llama": heads, "mistral": 8}.get(family, 32))
    head_dim = config.size("head_dim", 128 if family == "qwen3" else max(1, hidden // heads))
    if heads % kv_heads or head_dim % 2:
        raise LoadError(
            f"config.json: {heads} heads cannot share {kv_heads} key-value heads of size {head_dim}; "
            "heads must be a multiple, the size even"
        )
    max_position = config.size("max_position_embeddings")
    biased = config.flag("attention_bias") and family in ("llama", "qwen3")
    return ModelConfig(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        tied=config.flag("tie_word_embeddings"),
        rope=_rope(config, max_position),
        windows=_windows(config, family, layers),
        qkv_bias=biased or family == "qwen2",
        out_bias=biased,
        mlp_bias=family == "llama" and config.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )


def _rope(config: ConfigReader, max_position: int) -> Rope:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    values = config.raw.get("rope_parameters") or config.raw.get("rope_scaling") or {}
    if not isinstance(values, dict):
        raise LoadError(f"config.json: the rotary parameters must be an object, they are {values!r}")
    rope = ConfigReader(
        {"rope_theta": config.raw.get("rope_theta"), **values}, "config.json, rotary parameters"
    )
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise LoadError(
            f"rope type {kind!r} is not supported; the native backend computes default, linear and llama3"
        )
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise LoadError("partial rotary embedding is not supported; the native backend rotates whole heads")
    theta = rope.number("rope_theta", 10000.0)
    if kind == "default":
        return Rope(theta, kind)
    if kind == "linear":
        return Rope(theta, kind, rope.number("factor"))
    return Rope(
        theta,
        kind,
        rope.number("factor"),
        rope.number("low_freq_factor"),
        rope.number("high_freq_factor"),
        rope.size("original_max_position_embeddings", max_position),
    )


def _windows(config: ConfigReader, family: str, layers: int) -> tuple[int, ...]:
    raw = config.raw
    if family == "llama" or (family == "mistral" and raw.get("sliding_window", 4096) is None):
        return (0,) * layers
    if family == "mistral":
        return (config.size("sliding_window", 4096),) * layers
    if not config.flag("use_sliding_window") or raw.get("sliding_window", 4096) is None:
        return (0,) * layers
    window, first = config.size("sliding_window", 4096), raw.get("max_window_layers", 28)
    types = raw.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(layers)
    ]
    if len(types) != layers or not set(types) <= {"sliding_attention", "full_attention"}:
        raise LoadError(
            f"config.json: layer_types must name sliding_attention or full_attention for each of {layers} layers"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)
