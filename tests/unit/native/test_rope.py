"""Rotary frequencies of every kind against transformers, also where those of longrope depend on the context."""

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.worker.backends.native.model.config_reader import ConfigReader
from services.worker.backends.native.model.rope import head_order, rotation
from services.worker.backends.native.model.rope_config import Rope, read_rope

HEAD_DIM, ORIGINAL, LONGEST = 16, 64, 512
SCALED = {"factor": 8.0, "original_max_position_embeddings": ORIGINAL, "rope_theta": 5000.0}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0, "rope_theta": 5000.0},
    "llama3": {**SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": SCALED,
    "longrope": {**SCALED, **FACTORS, "partial_rotary_factor": 0.75},
}


@pytest.mark.parametrize("context", [ORIGINAL, LONGEST])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes", [{}, {"truncate": None}, {"attention_factor": 1.5}, {"high_freq_factor": 1.0}], ids=str
)
def test_frequencies_and_amplitudes(kind: str, changes: dict[str, Any], context: int) -> None:
    values = {"rope_type": kind, **KINDS[kind], **changes}
    config = LlamaConfig(
        head_dim=HEAD_DIM, max_position_embeddings=LONGEST, rope_parameters=dict(values), hidden_size=64
    )
    expected, amplitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=context)
    raw = {"rope_parameters": values, "max_position_embeddings": LONGEST}
    frequencies, amplitudes = rotation(read_rope(ConfigReader(raw), HEAD_DIM), HEAD_DIM, context)
    torch.testing.assert_close(frequencies[: len(expected)], expected.float())
    assert not frequencies[len(expected) :].any()
    torch.testing.assert_close(amplitudes[: len(expected)], torch.full_like(expected, amplitude))
    assert (amplitudes[len(expected) :] == 1).all()


def test_which_of_two_values_counts() -> None:
    """`rope_scaling` before `rope_parameters`, and the original context outside of both before that inside."""
    raw = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
        "original_max_position_embeddings": ORIGINAL, "max_position_embeddings": LONGEST, "rope_theta": 5000.0,
    }  # fmt: skip
    config = LlamaConfig(**copy.deepcopy(raw), head_dim=HEAD_DIM, hidden_size=64)
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    frequencies, _ = rotation(read_rope(ConfigReader(raw), HEAD_DIM), HEAD_DIM, LONGEST)
    torch.testing.assert_close(frequencies, expected.float())


def test_dimensions_that_are_not_rotated_stand_behind_the_rotated_ones_of_each_half() -> None:
    raw = {"partial_rotary_factor": 0.5, "max_position_embeddings": LONGEST}
    order = head_order(read_rope(ConfigReader(raw), 8), 8)
    assert order.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert head_order(None, 8) is None
    assert head_order(Rope(1e4, "default", neighbours=True), 8).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
