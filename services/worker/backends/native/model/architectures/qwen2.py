"""Qwen2: queries, keys and values have biases; later layers may read a window."""

from dataclasses import replace

from services.worker.backends.native.model.architectures.layer_types import FULL, SLIDING, windows
from services.worker.backends.native.model.config import Architecture, ModelConfig
from services.worker.backends.native.model.config_reader import ConfigReader

DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}


def configure(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    return replace(windowed(config, model), qkv_bias=True)


def windowed(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    """The layers from `max_window_layers` on read a window, if `use_sliding_window` is true."""
    if not config.flag("use_sliding_window") or config.raw.get("sliding_window") is None:
        return model
    first, layers = config.size("max_window_layers") if config.raw["max_window_layers"] else 0, model.num_layers
    default = [SLIDING if number >= first else FULL for number in range(layers)]
    return replace(model, windows=windows(config, layers, default))


ARCHITECTURE = Architecture(configure, DEFAULTS)
