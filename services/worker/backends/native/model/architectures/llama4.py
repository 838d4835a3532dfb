"""Llama 4's text: experts beside one that all tokens share, and layers without positions.

Layers with positions attend within chunks; in the others scores grow with the position. Neither changes anything before
its first border, so the context ends there.
"""

from dataclasses import replace

from services.worker.backends.native.model.architectures import llama, smollm3
from services.worker.backends.native.model.config import Architecture, ExpertsConfig, ModelConfig, TensorNames
from services.worker.backends.native.model.config_reader import ConfigReader
from services.worker.backends.native.model.rope_config import read_rope
from services.worker.runner import LoadError

BEFORE = "before attention_chunk_size and floor_scale change the attention, which is not supported"
CHUNKED, FULL = "chunked_attention", "full_attention"
_EXPERT = "feed_forward.experts.{}."
NAMES = TensorNames(
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    router="feed_forward.router",
    expert_gate_up=(_EXPERT + "gate_proj", _EXPERT + "up_proj"),
    expert_down=_EXPERT + "down_proj",
    stacked_experts=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
    alternating=False,
    shared_expert="feed_forward.shared_expert.",
)


def configure(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    rotated = smollm3.rotated(config, model.num_layers)
    rope = replace(read_rope(config, model.head_dim), neighbours=True)
    exact, normed = _exact_positions(config, rotated), config.flag("use_qk_norm")
    if normed:
        rope = replace(rope, attention_factor=1.0)  # the norm follows the rotation, and removes its amplitude
    return replace(
        llama.with_biases(config, model),
        names=NAMES,
        mlp_bias=False,
        intermediate_size=config.size("intermediate_size_mlp"),
        ropes=tuple(rope if turns else None for turns in rotated),
        norms_rotated_heads=normed,
        experts=_experts(config, model),
        max_position=exact,
        positions=model.positions if exact == model.max_position else BEFORE,
    )


def _exact_positions(config: ConfigReader, rotated: list[int]) -> int:
    """Return the number of positions that lie in the first chunk and have the temperature 1."""
    default = [CHUNKED if turns else FULL for turns in rotated]
    positions = [config.size("max_position_embeddings")]
    if CHUNKED in config.by_layer("layer_types", len(rotated), default, (CHUNKED, FULL)):
        positions.append(config.size("attention_chunk_size"))
    if config.raw.get("attn_temperature_tuning") and not all(rotated):
        positions.append(config.size("floor_scale") - 1)  # it divides the position plus 1
    return min(positions)


def _experts(config: ConfigReader, model: ModelConfig) -> ExpertsConfig:
    step, every = config.size("interleave_moe_layer_step"), range(model.num_layers)
    mixed = config.raw.get("moe_layers")
    mixed = list(every[step - 1 :: step]) if mixed is None else mixed
    if not isinstance(mixed, list) or any(number not in every for number in mixed):
        raise LoadError(f"config.json: moe_layers must name some of the layers 0 to {every[-1]}, it is {mixed!r:.80}")
    return ExpertsConfig(
        config.size("num_local_experts"),
        config.size("num_experts_per_tok"),
        model.intermediate_size,
        normalised=False,
        scales_input=True,
        shared_width=model.intermediate_size,
        dense_layers=frozenset(every) - frozenset(mixed),
    )


ARCHITECTURE = Architecture(
    configure,
    {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 16_384,
        "interleave_moe_layer_step": 1,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "use_qk_norm": True,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
    },
)
