"""Granite 3, with and without experts, and the dense models of Granite 4: a Llama with four multipliers."""

from dataclasses import replace

from services.worker.backends.native.model.architectures import llama, mistral
from services.worker.backends.native.model.config import Architecture, ModelConfig, TensorNames
from services.worker.backends.native.model.config_reader import ConfigReader

NAMES = TensorNames(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
EXPERT_NAMES = mistral.MIXTRAL_NAMES._replace(
    router="block_sparse_moe.router.layer",
    stacked_experts=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
)


def configure(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    return replace(
        llama.with_biases(config, model),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        attention_scale=config.number("attention_multiplier", 1.0),
        logits_scale=1 / config.number("logits_scaling", 1.0),
    )


def with_experts(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    return replace(configure(config, model), experts=mistral.experts(config, model), names=EXPERT_NAMES)


def dense_hybrid(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    """Granite 4 without experts and state space layers."""
    config.refuse("num_local_experts", 0)
    names = ("attention", "full_attention")
    config.by_layer("layer_types", model.num_layers, ["attention"] * model.num_layers, names)
    config.refuse("position_embedding_type", "rope", "nope")
    positions = model.ropes if config.raw.get("position_embedding_type") == "rope" else (None,) * model.num_layers
    return replace(
        configure(config, model),
        names=NAMES,
        intermediate_size=config.size("shared_intermediate_size"),
        ropes=positions,
        mlp_bias=False,
    )


ARCHITECTURE = Architecture(configure)
WITH_EXPERTS = Architecture(with_experts, {"num_local_experts": 8, "num_experts_per_tok": 2})
DENSE_HYBRID = Architecture(dense_hybrid)
