"""Gemma 3: norms around attention and MLP, a scaled embedding, and one full layer after every five with a window."""

from dataclasses import replace

from services.worker.backends.native.model.architectures.layer_types import FULL, SLIDING, ropes, windows
from services.worker.backends.native.model.config import Architecture, ModelConfig, TensorNames
from services.worker.backends.native.model.config_reader import ConfigReader

NAMES = TensorNames(
    attention_out="post_attention_layernorm", mlp_in="pre_feedforward_layernorm", mlp_out="post_feedforward_layernorm"
)


def configure(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        config.refuse(key)
    config.refuse("use_bidirectional_attention", False)
    layers, pattern = model.num_layers, config.size("sliding_window_pattern", 6)
    default = [SLIDING if (number + 1) % pattern else FULL for number in range(layers)]
    read, biased = windows(config, layers, default), config.flag("attention_bias")
    return replace(
        model,
        names=NAMES,
        windows=read,
        ropes=ropes(config, model.head_dim, read, 1e6, config.number("rope_local_base_freq", 1e4)),
        qkv_bias=biased,
        out_bias=biased,
        qk_norm=True,
        norm_offset=1.0,
        embedding_scale=model.hidden_size**0.5,
        attention_scale=config.number("query_pre_attn_scalar") ** -0.5,
    )


ARCHITECTURE = Architecture(
    configure,
    {
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131_072,
    },
)
