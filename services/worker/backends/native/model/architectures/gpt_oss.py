"""gpt-oss: mixtures of experts with biases and a clamped gate, attention with sinks, every second layer a window."""

from dataclasses import replace

from services.worker.backends.native.model.architectures.layer_types import FULL, SLIDING, windows
from services.worker.backends.native.model.config import Architecture, ExpertsConfig, ModelConfig, TensorNames
from services.worker.backends.native.model.config_reader import ConfigReader


def configure(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    config.refuse("swiglu_limit", 7.0)
    config.refuse("swiglu_alpha", 1.702)
    biased, layers = config.flag("attention_bias"), model.num_layers
    experts = ExpertsConfig(
        config.size("num_local_experts"),
        config.size("num_experts_per_tok"),
        model.intermediate_size,
        normalised=True,
        router_bias=True,
        bias=True,
    )
    return replace(
        model,
        windows=windows(config, layers, [SLIDING if number % 2 == 0 else FULL for number in range(layers)]),
        qkv_bias=biased,
        out_bias=biased,
        sinks=True,
        activation="clamped_silu",
        experts=experts,
        names=TensorNames(router="mlp.router"),
    )


YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
ARCHITECTURE = Architecture(
    configure,
    {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "rope_theta": 150_000.0,
        "rope_parameters": YARN,
        "rms_norm_eps": 1e-5,
    },
)
