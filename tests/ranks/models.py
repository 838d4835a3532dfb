"""Tiny checkpoints that can be cut into ranks, and the layouts of the ranks."""

from collections.abc import Callable
from functools import partial

import pytest
from transformers import PreTrainedModel

from tests.integration.native.conftest import SMALL, VARIANTS
from tests.random_models import random_model

DEEP = {**SMALL, "num_hidden_layers": 5}
"""Its stages are unequal, 211 token ids do not divide evenly, and two KV heads are fewer than four ranks."""
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "tied": partial(random_model, "llama", **DEEP, tie_word_embeddings=True),
    "untied-biased": partial(
        random_model, "llama", **DEEP, tie_word_embeddings=False, attention_bias=True, mlp_bias=True, head_dim=24
    ),
    "qwen3": partial(random_model, "qwen3", **DEEP, head_dim=32),
    "gemma3": partial(VARIANTS["gemma3"], num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2),
    "gpt-oss": partial(VARIANTS["gpt-oss"], num_hidden_layers=5),
    "llama4": partial(VARIANTS["llama4"], num_hidden_layers=5, moe_layers=[1, 2, 4], no_rope_layers=[1, 0, 1, 0, 1]),
}
UNEQUAL: dict[str, Callable[[], PreTrainedModel]] = {
    "nine-heads": lambda: _with_heads(9, 3, attention_bias=True),
    "four-heads": lambda: _with_heads(4, 4),
}
"""KV heads that do not divide by two or three ranks."""
LAYOUTS = [(2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]
"""Tensor-parallel ranks x pipeline stages."""


def _with_heads(heads: int, kv_heads: int, **options: bool) -> PreTrainedModel:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes |= {"hidden_size": 72, "intermediate_size": 96, "head_dim": 16}
    return random_model("llama", **{**DEEP, **sizes}, **options)


def per_change(*layouts: tuple[int, int]) -> list[object]:
    """Return all LAYOUTS as parameters, of which only `layouts` run per change; `make soak` runs the others too."""
    return [
        pytest.param(layout, id=str(layout), marks=() if layout in layouts else (pytest.mark.soak,))
        for layout in LAYOUTS
    ]
