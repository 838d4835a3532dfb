"""OLMo 2 and 3: norms of the outputs of attention and MLP instead of their inputs, and of all heads together."""

from dataclasses import replace

from services.worker.backends.native.model.architectures.layer_types import FULL, SLIDING, ropes, windows
from services.worker.backends.native.model.config import Architecture, ModelConfig, TensorNames
from services.worker.backends.native.model.config_reader import ConfigReader

NAMES = TensorNames(
    attention_in="", attention_out="post_attention_layernorm", mlp_in="", mlp_out="post_feedforward_layernorm"
)


def olmo2(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    biased = config.flag("attention_bias")
    return replace(model, names=NAMES, qk_norm=True, qk_norm_of_all_heads=True, qkv_bias=biased, out_bias=biased)


def olmo3(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    """Three of four layers read a window; rotary scaling is for the others."""
    layers = model.num_layers
    default = [SLIDING if (number + 1) % 4 else FULL for number in range(layers)]
    read = windows(config, layers, default)
    theta = config.number("rope_theta", 5e5)
    turns = ropes(config, model.head_dim, read, theta, theta)
    return replace(olmo2(config, model), windows=read, ropes=turns)


OLMO2 = Architecture(olmo2, {"rms_norm_eps": 1e-5})
OLMO3 = Architecture(olmo3, {"sliding_window": 4096, "rms_norm_eps": 1e-5})
