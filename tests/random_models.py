"""Models of transformers with random weights."""

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def random_model(architecture: str, **config: Any) -> PreTrainedModel:
    """Return a model of an architecture, which is named as `model_type` in config.json."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **config))
