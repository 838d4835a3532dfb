"""Phi-3 and Phi-4-mini: stacked projections, heads that are rotated in part, and longrope."""

from dataclasses import replace

from services.worker.backends.native.model.architectures import mistral
from services.worker.backends.native.model.config import Architecture, ModelConfig, TensorNames
from services.worker.backends.native.model.config_reader import ConfigReader

NAMES = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def configure(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    return replace(mistral.windowed(config, model), names=NAMES)


ARCHITECTURE = Architecture(configure, {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}, True)
