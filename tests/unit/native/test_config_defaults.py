"""Keys that config.json leaves out have the values of transformers."""

import contextlib
import json
from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from services.worker.backends.native.model.architectures import ARCHITECTURES
from services.worker.backends.native.model.config import ModelConfig
from services.worker.runner import LoadError

TYPES = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name in ARCHITECTURES}
DENSE = {"num_local_experts": 0, "layer_types": ["attention"] * 32, "position_embedding_type": "rope"}


def read(path: Path, values: dict[str, object], architecture: str) -> ModelConfig:
    (path / "config.json").write_text(json.dumps({**values, "architectures": [architecture]}))
    return ModelConfig.from_checkpoint(path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_key_that_is_left_out_has_its_default_or_is_required(architecture: str, tmp_path: Path) -> None:
    changes = DENSE if "Hybrid" in architecture else {}
    values = json.loads(AutoConfig.for_model(TYPES[architecture], **changes).to_json_string(use_diff=False))
    whole = read(tmp_path, values, architecture)
    for key in set(values) - set(changes):
        with contextlib.suppress(LoadError):
            assert read(tmp_path, {k: v for k, v in values.items() if k != key}, architecture) == whole, key


def test_layers_of_mistral_with_types(tmp_path: Path) -> None:
    values = json.loads(AutoConfig.for_model("mistral", num_hidden_layers=2).to_json_string(use_diff=False))
    values["layer_types"] = ["full_attention", "sliding_attention"]
    assert read(tmp_path, values, "MistralForCausalLM").windows == (0, 4096)
