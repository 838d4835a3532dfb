"""Models of transformers with random weights, and changes of their checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn


def random_model(architecture: str, **config: Any) -> nn.Module:
    """Return a model of an architecture, which is named as `model_type` in config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM  # its import takes longer than torch's

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **config))


def edit_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


def edit_tensors(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")
