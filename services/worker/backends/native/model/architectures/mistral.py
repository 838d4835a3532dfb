"""Mistral, Mixtral, Phi-3 and Phi-4-mini: every layer reads a window, unless `sliding_window` is null."""

from dataclasses import replace

from services.worker.backends.native.model.architectures import layer_types
from services.worker.backends.native.model.config import Architecture, ExpertsConfig, ModelConfig, TensorNames
from services.worker.backends.native.model.config_reader import ConfigReader

_EXPERT = "block_sparse_moe.experts.{}."
MIXTRAL_NAMES = TensorNames(
    router="block_sparse_moe.gate", expert_gate_up=(_EXPERT + "w1", _EXPERT + "w3"), expert_down=_EXPERT + "w2"
)
PHI3_NAMES = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def windowed(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    if config.raw.get("sliding_window") is None:
        return model
    return replace(model, windows=(config.size("sliding_window"),) * model.num_layers)


def mistral(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    """`layer_types` may say otherwise."""
    if config.raw.get("layer_types") is None:
        return windowed(config, model)
    return replace(model, windows=layer_types.windows(config, model.num_layers, []))


def experts(config: ConfigReader, model: ModelConfig) -> ExpertsConfig:
    number, chosen = config.size("num_local_experts"), config.size("num_experts_per_tok")
    return ExpertsConfig(number, chosen, model.intermediate_size, normalised=True)


def mixtral(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    """The MLPs are mixtures of experts, with tensor names of their own."""
    return replace(windowed(config, model), experts=experts(config, model), names=MIXTRAL_NAMES)


def phi3(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    """Stacked projections, heads that are rotated in part, and longrope."""
    return replace(windowed(config, model), names=PHI3_NAMES)


MISTRAL = Architecture(mistral, {"num_key_value_heads": 8, "sliding_window": 4096})
MIXTRAL = Architecture(
    mixtral,
    {
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
    },
)
PHI3 = Architecture(phi3, {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}, rotates_in_part=True)
