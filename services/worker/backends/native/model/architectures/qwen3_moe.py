"""Qwen3-MoE: a Qwen3 whose MLPs are mixtures of experts, and whose window is for all layers."""

from dataclasses import replace

from services.worker.backends.native.model.architectures import mistral, qwen3
from services.worker.backends.native.model.config import Architecture, ExpertsConfig, ModelConfig
from services.worker.backends.native.model.config_reader import ConfigReader


def configure(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    config.refuse("decoder_sparse_step", 1)
    config.refuse("mlp_only_layers", [])
    experts = ExpertsConfig(
        config.size("num_experts", config.size("num_local_experts", 128)),
        config.size("num_experts_per_tok"),
        config.size("moe_intermediate_size"),
        config.flag("norm_topk_prob"),
    )
    windows = mistral.windowed(config, model).windows if config.flag("use_sliding_window") else model.windows
    return replace(qwen3.configure(config, model), windows=windows, experts=experts)


ARCHITECTURE = Architecture(configure, {**qwen3.DEFAULTS, "num_key_value_heads": 4, "num_experts_per_tok": 8})
