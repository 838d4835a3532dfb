"""SmolLM3: a Llama in which every fourth layer has no positions."""

from dataclasses import replace

from services.worker.backends.native.model.architectures import llama
from services.worker.backends.native.model.config import Architecture, ModelConfig
from services.worker.backends.native.model.config_reader import ConfigReader


def rotated(config: ConfigReader, layers: int) -> list[int]:
    """Return 1 for each layer with positions, 0 for the others."""
    interval = config.size("no_rope_layer_interval")
    default = [int((number + 1) % interval != 0) for number in range(layers)]
    if config.raw.get("no_rope_layers") == []:  # as in Llama 4's
        return default
    return config.by_layer("no_rope_layers", layers, default, (0, 1))


def configure(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    if config.flag("use_sliding_window"):
        config.refuse("sliding_window")
    turned = rotated(config, model.num_layers)
    ropes = tuple(rope if turns else None for rope, turns in zip(model.ropes, turned, strict=True))
    return replace(llama.with_biases(config, model), ropes=ropes)


ARCHITECTURE = Architecture(
    configure, {"num_key_value_heads": 4, "no_rope_layer_interval": 4, "tie_word_embeddings": True, "rope_theta": 2e6}
)
