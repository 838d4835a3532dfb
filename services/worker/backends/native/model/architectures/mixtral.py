"""Mixtral: a Mistral whose MLPs are mixtures of experts, with tensor names of its own."""

from dataclasses import replace

from services.worker.backends.native.model.architectures import mistral
from services.worker.backends.native.model.config import Architecture, ExpertsConfig, ModelConfig, TensorNames
from services.worker.backends.native.model.config_reader import ConfigReader

_EXPERT = "block_sparse_moe.experts.{}."
NAMES = TensorNames(
    router="block_sparse_moe.gate", expert_gate_up=(_EXPERT + "w1", _EXPERT + "w3"), expert_down=_EXPERT + "w2"
)


def experts(config: ConfigReader, model: ModelConfig) -> ExpertsConfig:
    number, chosen = config.size("num_local_experts"), config.size("num_experts_per_tok")
    return ExpertsConfig(number, chosen, model.intermediate_size, normalised=True)


def configure(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    return replace(mistral.windowed(config, model), experts=experts(config, model), names=NAMES)


ARCHITECTURE = Architecture(
    configure,
    {
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
    },
)
