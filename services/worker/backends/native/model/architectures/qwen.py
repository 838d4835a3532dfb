"""Qwen2, Qwen3 and Qwen3-MoE."""

from dataclasses import replace

from services.worker.backends.native.model.architectures import mistral
from services.worker.backends.native.model.architectures.layer_types import FULL, SLIDING, windows
from services.worker.backends.native.model.config import Architecture, ExpertsConfig, ModelConfig
from services.worker.backends.native.model.config_reader import ConfigReader

_QWEN2 = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_QWEN3 = {**_QWEN2, "head_dim": 128}


def _windowed(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    """The layers from `max_window_layers` on read a window, if `use_sliding_window` is true."""
    if not config.flag("use_sliding_window") or config.raw.get("sliding_window") is None:
        return model
    first, layers = config.size("max_window_layers") if config.raw["max_window_layers"] else 0, model.num_layers
    default = [SLIDING if number >= first else FULL for number in range(layers)]
    return replace(model, windows=windows(config, layers, default))


def qwen2(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    """Queries, keys and values have biases."""
    return replace(_windowed(config, model), qkv_bias=True)


def qwen3(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    """Queries and keys are normalised head by head."""
    biased = config.flag("attention_bias")
    return replace(_windowed(config, model), qkv_bias=biased, out_bias=biased, qk_norm=True)


def qwen3_moe(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    """The MLPs are mixtures of experts, and the window is for all layers."""
    config.refuse("decoder_sparse_step", 1)
    config.refuse("mlp_only_layers", [])
    experts = ExpertsConfig(
        config.size("num_experts", config.size("num_local_experts", 128)),
        config.size("num_experts_per_tok"),
        config.size("moe_intermediate_size"),
        config.flag("norm_topk_prob"),
    )
    read = mistral.windowed(config, model).windows if config.flag("use_sliding_window") else model.windows
    return replace(qwen3(config, model), windows=read, experts=experts)


QWEN2 = Architecture(qwen2, _QWEN2)
QWEN3 = Architecture(qwen3, _QWEN3)
QWEN3_MOE = Architecture(qwen3_moe, {**_QWEN3, "num_key_value_heads": 4, "num_experts_per_tok": 8})
