"""Models of transformers with random weights."""

from typing import Any

from torch import nn


def random_model(architecture: str, **config: Any) -> nn.Module:
    """Return a model of an architecture, which is named as `model_type` in config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM  # its import takes longer than torch's

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **config))
