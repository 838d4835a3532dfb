"""OLMoE: a Llama whose MLPs are mixtures of experts, with norms of queries and keys of all heads together."""

from dataclasses import replace

from services.worker.backends.native.model.architectures import llama
from services.worker.backends.native.model.config import Architecture, ExpertsConfig, ModelConfig
from services.worker.backends.native.model.config_reader import ConfigReader


def configure(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    config.refuse("clip_qkv")
    experts = ExpertsConfig(
        config.size("num_experts", config.size("num_local_experts", 64)),
        config.size("num_experts_per_tok"),
        model.intermediate_size,
        config.flag("norm_topk_prob"),
    )
    return replace(llama.with_biases(config, model), qk_norm=True, qk_norm_of_all_heads=True, experts=experts)


ARCHITECTURE = Architecture(configure, {"num_experts_per_tok": 8, "rms_norm_eps": 1e-5})
