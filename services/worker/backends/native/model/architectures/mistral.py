"""Mistral: every layer reads a window, unless `sliding_window` is null."""

from dataclasses import replace

from services.worker.backends.native.model.config import Architecture, ModelConfig
from services.worker.backends.native.model.config_reader import ConfigReader


def windowed(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    if config.raw.get("sliding_window") is None:
        return model
    return replace(model, windows=(config.size("sliding_window"),) * model.num_layers)


ARCHITECTURE = Architecture(windowed, {"num_key_value_heads": 8, "sliding_window": 4096})
