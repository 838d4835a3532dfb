"""Llama: biases are optional."""

from dataclasses import replace

from services.worker.backends.native.model.config import Architecture, ModelConfig
from services.worker.backends.native.model.config_reader import ConfigReader


def with_biases(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    biased = config.flag("attention_bias")
    return replace(model, qkv_bias=biased, out_bias=biased, mlp_bias=config.flag("mlp_bias"))


ARCHITECTURE = Architecture(with_biases)
