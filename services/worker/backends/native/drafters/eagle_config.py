"""The config.json of an EAGLE checkpoint, checked against the model that it drafts for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.worker.backends.native.model.architectures import llama
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.config_reader import ConfigReader, read_config
from services.worker.backends.native.model.forward import FINAL
from services.worker.runner import LoadError

_PLAIN = "LlamaForCausalLM"
"""The architecture in most published heads of both kinds; the method of `--speculative-config` distinguishes them."""
ARCHITECTURES = {
    "eagle": (_PLAIN, "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"),
    "eagle3": (_PLAIN, "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"),
}
_NOT_COMPUTED = ("norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class EagleConfig:
    """A drafter of one decoder layer that reads the target's hidden states."""

    layer: ModelConfig
    """The layer, as a model of one layer."""
    reads: tuple[int, ...]
    """Hidden states of the target: FINAL for EAGLE; for EAGLE-3, the inputs of layers, given by their numbers."""
    draft_vocab_size: int
    """Number of ids that the head has logits for."""
    norm_before_residual: bool
    """EAGLE-3: True if the hidden state is added to the residual stream after its norm."""

    @classmethod
    def from_directory(cls, directory: Path, method: str, target: ModelConfig) -> "EagleConfig":
        """Raises: LoadError, also when the head belongs to a model of another shape."""
        raw = read_config(directory)
        config, nested = ConfigReader(raw), _object(raw, "eagle_config")
        _refuse(raw, nested)
        layer = ModelConfig.from_checkpoint(directory, dict.fromkeys(ARCHITECTURES[method], llama.ARCHITECTURE))
        if layer.num_layers != 1:
            raise LoadError(f"an EAGLE head has one layer, config.json says {layer.num_layers}")
        if layer.vocab_size != target.vocab_size:
            raise LoadError(
                f"its vocabulary has {layer.vocab_size} tokens, that of the model {target.vocab_size}; "
                "use the head that was made for this model"
            )
        read = config.size("target_hidden_size", layer.hidden_size) if method == "eagle3" else layer.hidden_size
        if read != target.hidden_size:
            raise LoadError(
                f"it reads hidden states of size {read}, those of the model have {target.hidden_size}; "
                "use the head that was made for this model"
            )
        return cls(
            layer=layer,
            reads=(FINAL,) if method == "eagle" else _layers(raw, nested, target),
            draft_vocab_size=config.size("draft_vocab_size", layer.vocab_size),
            norm_before_residual=method == "eagle3" and config.flag("norm_before_residual"),
        )


def _object(raw: dict[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise LoadError(f"config.json: {key!r} must be an object, it is {value!r}")
    return value


def _refuse(raw: dict[str, Any], nested: dict[str, Any]) -> None:
    if "transformer_layer_config" in raw or isinstance(raw.get("model"), dict):
        raise LoadError("nested EAGLE configurations are not supported; use the head in its original format")
    for key in _NOT_COMPUTED:
        if raw.get(key) or nested.get(key):
            raise LoadError(f"EAGLE heads with {key!r} are not supported")
    if nested.get("use_aux_hidden_state", True) is not True:
        raise LoadError("EAGLE-3 heads without auxiliary hidden states are not supported; is it an EAGLE head?")


def _layers(raw: dict[str, Any], nested: dict[str, Any], target: ModelConfig) -> tuple[int, ...]:
    """Return the layers that the checkpoint names; by default a low, a middle and a high one."""
    key = "eagle_aux_hidden_state_layer_ids"
    named = raw.get(key) or nested.get(key)
    count = target.num_layers
    layers = named if named is not None else [2, count // 2, count - 3]
    if not isinstance(layers, list) or not all(type(n) is int and 0 <= n < count for n in layers):
        raise LoadError(f"config.json: {key!r} must be layers of the model, 0 to {count - 1}, they are {layers!r}")
    if len(set(layers)) < len(layers):
        raise LoadError(f"config.json: {key!r} names a layer twice or is missing for a model of {count} layers")
    return tuple(sorted(layers))
