"""A checkpoint's config.json, checked. Models that this backend cannot compute are refused by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from services.worker.backends.native.model.config_reader import ConfigReader, read_config
from services.worker.backends.native.model.rope_config import Rope, read_rope
from services.worker.runner import LoadError

Activation = Literal["silu", "gelu_tanh", "clamped_silu"]
"""Function of the gate; `NetworkKernels.gate_and_multiply` defines them."""
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"
}  # fmt: skip


class TensorNames(NamedTuple):
    """Names of a layer's tensors, without prefix and suffix. An empty name: the layer has no such norm."""

    attention_in: str = "input_layernorm"
    """Norm of the input of attention."""
    attention_out: str = ""
    """Norm of its output, before that is added to the residual stream."""
    mlp_in: str = "post_attention_layernorm"
    mlp_out: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three tensors, or one with the rows of all."""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Two tensors, or one with the rows of both."""
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    stacked_experts: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    """Tensors that some checkpoints have for all experts of a layer together: [experts, inputs, outputs], where rows of
    gate and up alternate; or, with the suffix `weight`, [experts, outputs, inputs], where up follows gate."""
    alternating: bool = True
    """False: up follows gate without the suffix, too."""
    shared_expert: str = "mlp.shared_expert."
    """Begin of the names `gate_proj`, `up_proj` and `down_proj`."""


class ExpertsConfig(NamedTuple):
    """The MLP is a mixture of experts. A router chooses the experts of each token."""

    number: int
    per_token: int
    width: int
    """Intermediate dimensions of an expert."""
    normalised: bool
    """The weights of a token's experts sum to 1: their softmax is over these experts only."""
    router_bias: bool = False
    bias: bool = False
    """Products of experts have biases."""
    scales_input: bool = False
    """The sigmoid of a chosen expert's logit is a factor of its input, instead of a softmax of its output."""
    shared_width: int = 0
    """Intermediate dimensions of one more expert, which computes all tokens; 0: there is none."""
    dense_layers: frozenset[int] = frozenset()
    """Layers with an MLP instead."""


LLAMA_NAMES = TensorNames()


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with RMS norms, grouped-query attention and a gated MLP.

    Defaults of the fields are those of Llama. An architecture is a function that changes them
    (`services/worker/backends/native/model/architectures/`); everything else reads only this configuration.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    tied: bool
    ropes: tuple[Rope | None, ...]
    """Rotary positions by layer; None: the layer has no positions."""
    windows: tuple[int, ...]
    """Number of keys that a query reads, by layer, its own included; 0: all."""
    dtype: str
    """dtype of the checkpoint, for `--dtype auto`; other dtypes are read as float32."""
    names: TensorNames = LLAMA_NAMES
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised before the rotation."""
    qk_norm_of_all_heads: bool = False
    """The norm is over all heads of a token together, so that a rank needs all of them."""
    norms_rotated_heads: bool = False
    """Queries and keys of layers with positions are normalised head by head, without weights."""
    norm_offset: float = 0.0
    """Added to the weights of norms as the checkpoint stores them."""
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of the outputs of attention and MLP."""
    attention_scale: float = 0.0
    """Factor of the scores; 0: 1 / sqrt(head_dim)."""
    logits_scale: float = 1.0
    sinks: bool = False
    """Each head has a sink: one more score in the softmax, without a value."""
    experts: ExpertsConfig | None = None
    positions: str = "of the model"
    """Words behind the number of positions in messages."""

    @property
    def divided_widths(self) -> tuple[int, ...]:
        """Widths of the MLPs that tensor-parallel ranks divide among them; experts are not divided."""
        if self.experts is None:
            return (self.intermediate_size,)
        dense = (self.intermediate_size,) if self.experts.dense_layers else ()
        return (*dense, self.experts.shared_width) if self.experts.shared_width else dense

    @classmethod
    def from_checkpoint(cls, path: Path, architectures: "Mapping[str, Architecture] | None" = None) -> "ModelConfig":
        """Read the configuration of a directory or of a GGUF file.

        Args:
            architectures: the ones that are supported, by their names in `transformers`; None: all

        Raises: LoadError, when config.json is missing or broken, or its model is not supported.
        """
        if architectures is None:
            from services.worker.backends.native.model.architectures import ARCHITECTURES

            architectures = ARCHITECTURES
        raw = read_config(path)
        _refuse_unsupported(raw)
        architecture = _architecture(raw, architectures)
        if (path / "adapter_config.json").is_file():
            raise LoadError(f"{path} holds a LoRA adapter; adapters are not served, merge it into its base model first")
        reader = ConfigReader({**architecture.defaults, **raw})
        model = architecture.configure(reader, _plain(reader))
        if not architecture.rotates_in_part and any(rope and rope.rotated != 1 for rope in model.ropes):
            raise LoadError("config.json: 'partial_rotary_factor' is not supported with this architecture")
        if (experts := model.experts) and experts.per_token > experts.number:
            raise LoadError(
                f"config.json: 'num_experts_per_tok' {experts.per_token} is above the number of experts, "
                f"{experts.number}"
            )
        return model


class Architecture(NamedTuple):
    """The differences of an architecture from Llama."""

    configure: Callable[[ConfigReader, ModelConfig], ModelConfig]
    """Changes the configuration that is read as that of a Llama without biases. Raises: LoadError"""
    defaults: Mapping[str, Any] = {}
    """Values of keys that config.json may leave out."""
    rotates_in_part: bool = False
    """`partial_rotary_factor` counts."""


def _architecture(raw: dict[str, Any], architectures: Mapping[str, Architecture]) -> Architecture:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    works = ", ".join(architectures)
    if name is None:
        raise LoadError(f"config.json names no architecture; the native backend computes {works}")
    if name not in architectures:
        raise LoadError(
            f"architecture {name} is not supported; the native backend computes {works}; try --backend vllm "
            "(docs/vllm.md)"
        )
    return architectures[name]


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    if raw.get("quantization_config") is not None:
        method = raw["quantization_config"]
        method = method.get("quant_method", "quantised") if isinstance(method, dict) else "quantised"
        raise LoadError(f"quantised weights ({method}) are not supported; use the checkpoint in bfloat16 or float32")
    for key in ("vision_config", "audio_config"):
        if raw.get(key) is not None:
            raise LoadError(f"multimodal models ({key}) are not supported; use the text-only checkpoint")


def _activation(config: ConfigReader) -> Activation:
    name = config.raw.get("hidden_activation") or config.raw.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        works = ", ".join(ACTIVATIONS)
        raise LoadError(f"activation {name!r:.80} is not supported; the native backend computes {works}")
    return ACTIVATIONS[name]


def _plain(config: ConfigReader) -> ModelConfig:
    """Return the configuration of a Llama without biases whose layers read all keys."""
    config.refuse("is_causal", True)
    heads, hidden, layers = (config.size(k) for k in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    kv_heads = config.size("num_key_value_heads", heads)
    head_dim = config.size("head_dim", max(1, hidden // heads))
    if heads % kv_heads or head_dim % 2:
        raise LoadError(
            f"config.json: {heads} heads cannot share {kv_heads} key-value heads of size {head_dim}; "
            "heads must be a multiple, the size even"
        )
    max_position = config.size("max_position_embeddings")
    return ModelConfig(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        tied=config.flag("tie_word_embeddings"),
        ropes=(read_rope(config, head_dim),) * layers,
        windows=(0,) * layers,
        dtype=str(config.raw.get("dtype") or config.raw.get("torch_dtype") or "float32"),
        activation=_activation(config),
    )
