"""Qwen3: queries and keys are normalised head by head; windows as in Qwen2."""

from dataclasses import replace

from services.worker.backends.native.model.architectures import qwen2
from services.worker.backends.native.model.config import Architecture, ModelConfig
from services.worker.backends.native.model.config_reader import ConfigReader

DEFAULTS = {**qwen2.DEFAULTS, "head_dim": 128}


def configure(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    biased = config.flag("attention_bias")
    return replace(qwen2.windowed(config, model), qkv_bias=biased, out_bias=biased, qk_norm=True)


ARCHITECTURE = Architecture(configure, DEFAULTS)
