"""An EAGLE head that does not fit is refused in one line that names what is wrong, before anything is served."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.runner import LoadError
from tests.random_models import edit_config, edit_tensors
from tests.unit.native.eagle_heads import CONTEXT, HIDDEN, VOCAB, EagleSetup, HeadCheckpoint

NAMED = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}


@pytest.fixture
def setup(tmp_path: Path) -> EagleSetup:
    return EagleSetup(tmp_path, HeadCheckpoint("eagle"))


@pytest.fixture
def three(tmp_path: Path) -> EagleSetup:
    return EagleSetup(tmp_path, HeadCheckpoint("eagle3", NAMED, draft_vocab=70))


def refusal(setup: EagleSetup, **speculation: Any) -> str:
    head = setup.path.parent / "head"
    with pytest.raises(LoadError) as caught:
        setup.load(head, **speculation)
    text = str(caught.value)
    assert text.startswith(f"drafter {head}: ")
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 128}, f"reads hidden states of size 128, those of the model have {HIDDEN}"),
        ({"vocab_size": 99}, f"its vocabulary has 99 tokens, that of the model {VOCAB}"),
        ({"num_hidden_layers": 2}, "an EAGLE head has one layer, config.json says 2"),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "architecture Eagle3LlamaForCausalLM is not supported"),
        ({"architectures": ["MedusaModel"]}, "architecture MedusaModel is not supported"),
        ({"model": {"hidden_size": 64}}, "nested EAGLE configurations are not supported"),
        ({"draft_vocab_size": 70}, "no tensor d2t"),
        ({"intermediate_size": 96}, "mlp.gate_proj.weight is [104, 64], but config.json says [96, 64]"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised weights (awq)"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"attention_bias": True}, "no tensor layers.0.self_attn.q_proj.bias"),
    ],
)
def test_eagle_configurations(setup: EagleSetup, changes: dict[str, Any], said: str) -> None:
    edit_config(setup.path.parent / "head", **changes)
    assert said in refusal(setup)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_hidden_size": 32}, f"reads hidden states of size 32, those of the model have {HIDDEN}"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}, "must be layers of the model, 0 to 4, they are [1, 2, 5]"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, "names a layer twice"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "fc.weight is [64, 192], but config.json says [64, 128]"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "names a layer twice or is missing for a model of 5 layers"),
        ({"norm_before_fc": True}, "'norm_before_fc' are not supported"),
        ({"eagle_config": {"norm_output": True}}, "'norm_output' are not supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "without auxiliary hidden states"),
        ({"eagle_config": "low"}, "'eagle_config' must be an object"),
        ({"draft_vocab_size": 71}, "lm_head.weight is [70, 64], but config.json says [71, 64]|d2t has 70 entries"),
    ],
)
def test_eagle3_configurations(three: EagleSetup, changes: dict[str, Any], said: str) -> None:
    edit_config(three.path.parent / "head", **changes)
    assert any(one in refusal(three) for one in said.split("|"))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("fc.weight", None, "no tensor fc.weight"),
        ("midlayer.hidden_norm.weight", None, "no tensor midlayer.hidden_norm.weight"),
        ("d2t", None, "no tensor d2t"),
        ("d2t", torch.full((70,), VOCAB), f"d2t names tokens outside of the vocabulary of {VOCAB}"),
        ("d2t", torch.full((70,), -1), "d2t names tokens outside"),
        ("d2t", torch.zeros(70), "d2t must be a list of whole numbers"),
        ("t2d", torch.ones(VOCAB, dtype=torch.bool), "d2t and t2d do not name the same tokens"),
    ],
)
def test_eagle3_tensors(three: EagleSetup, name: str, value: torch.Tensor | None, said: str) -> None:
    edit_tensors(three.path.parent / "head", lambda w: w.pop(name) if value is None else w.update({name: value}))
    assert said in refusal(three)


def test_a_whole_model_is_no_head(setup: EagleSetup) -> None:
    with pytest.raises(LoadError, match=r"an EAGLE head has one layer, config\.json says 5"):
        setup.load(setup.path)


def test_longer_contexts_than_the_head_has_positions(setup: EagleSetup) -> None:
    with pytest.raises(LoadError, match=f'"max_model_len" 97 is more than the {CONTEXT} positions of the drafter'):
        setup.load(setup.path.parent / "head", max_model_len=CONTEXT + 1)


def test_no_such_checkpoint(setup: EagleSetup) -> None:
    with pytest.raises(LoadError, match="drafter /nowhere: no such model directory"):
        setup.load(Path("/nowhere"))


def test_pickled_weights_are_not_read(setup: EagleSetup) -> None:
    head = setup.path.parent / "head"
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    assert "convert its .bin files, which can run code when loaded" in refusal(setup)
