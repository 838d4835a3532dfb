"""Mistral: every layer reads a window, unless `sliding_window` is null or `layer_types` says otherwise."""

from dataclasses import replace

from services.worker.backends.native.model.architectures import layer_types
from services.worker.backends.native.model.config import Architecture, ModelConfig
from services.worker.backends.native.model.config_reader import ConfigReader


def windowed(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    if config.raw.get("sliding_window") is None:
        return model
    return replace(model, windows=(config.size("sliding_window"),) * model.num_layers)


def configure(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    if config.raw.get("layer_types") is None:
        return windowed(config, model)
    return replace(model, windows=layer_types.windows(config, model.num_layers, []))


ARCHITECTURE = Architecture(configure, {"num_key_value_heads": 8, "sliding_window": 4096})
