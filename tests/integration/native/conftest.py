"""Tiny random checkpoints of every family, made with transformers, whose answers are the reference."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.random_models import random_model

SMALL = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip

YARN = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 8.0, "original_max_position_embeddings": 32,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 5000.0, "factor": 4.0, "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
}  # fmt: skip
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""Within the small vocabulary, unlike the defaults of some architectures."""
MULTIPLIERS = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.5
}  # fmt: skip

VARIANTS: dict[str, Callable[[], nn.Module]] = {
    "llama-tied": partial(random_model, "llama", **SMALL, tie_word_embeddings=True),
    "llama-untied-biased": partial(
        random_model, "llama", **SMALL, tie_word_embeddings=False, attention_bias=True, mlp_bias=True, head_dim=24
    ),
    "llama-rope-llama3": partial(random_model, "llama", **SMALL, rope_parameters=LLAMA3),
    "llama-rope-linear": partial(
        random_model, "llama", **SMALL, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    ),
    "llama-multi-head": partial(random_model, "llama", **{**SMALL, "num_key_value_heads": 4}),
    "llama-wide-heads": partial(random_model, "llama", **SMALL, head_dim=80),
    "mistral-window": partial(random_model, "mistral", **SMALL, sliding_window=21),
    "mistral-full": partial(random_model, "mistral", **SMALL, sliding_window=None),
    "qwen2": partial(random_model, "qwen2", **SMALL),
    "qwen2-window": partial(
        random_model, "qwen2", **SMALL, use_sliding_window=True, sliding_window=18, max_window_layers=1
    ),
    "qwen3": partial(random_model, "qwen3", **SMALL, head_dim=32),
    "qwen3-seven-groups": partial(
        random_model, "qwen3",
        **{**SMALL, "num_attention_heads": 7, "num_key_value_heads": 1}, head_dim=16, attention_bias=True
    ),
    "smollm3": partial(random_model, "smollm3", **SMALL, **TOKENS, no_rope_layer_interval=2),
    "granite": partial(random_model, "granite", **SMALL, **MULTIPLIERS),
    "granite4-dense": partial(
        random_model, "granitemoehybrid",
        **{**SMALL, "initializer_range": 0.3}, **MULTIPLIERS, num_local_experts=0, num_experts_per_tok=0,
        shared_intermediate_size=104, layer_types=["attention"] * 3, position_embedding_type="rope",
    ),
    "olmo2": partial(random_model, "olmo2", **SMALL, **TOKENS),
    "olmo3-yarn": partial(
        random_model, "olmo3",
        **SMALL, **TOKENS, sliding_window=19, rope_parameters={**TWO_ROPES, "full_attention": YARN},
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3-longrope-partial": partial(
        random_model, "phi3", **SMALL, **TOKENS, sliding_window=64, original_max_position_embeddings=256,
        rope_parameters={**LONGROPE, "partial_rotary_factor": 0.75},
    ),
    "gemma3": partial(
        random_model, "gemma3_text",
        **{**SMALL, "initializer_range": 0.3}, **TOKENS, head_dim=24, sliding_window=13, query_pre_attn_scalar=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], rope_parameters=TWO_ROPES,
    ),
    "qwen3-moe": partial(
        random_model, "qwen3_moe",
        **SMALL, head_dim=32, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=False,
        use_sliding_window=True, sliding_window=23,
    ),
    "mixtral": partial(random_model, "mixtral", **SMALL, num_local_experts=4, num_experts_per_tok=2),
    "granitemoe": partial(
        random_model, "granitemoe", **SMALL, **MULTIPLIERS, num_local_experts=4, num_experts_per_tok=2
    ),
    "olmoe": partial(random_model, "olmoe", **SMALL, **TOKENS, num_experts=6, num_experts_per_tok=3),
    "gpt-oss": partial(
        random_model, "gpt_oss",
        **SMALL, **TOKENS, head_dim=24, num_local_experts=4, num_experts_per_tok=2, sliding_window=15,
        rope_parameters={**YARN, "truncate": False},
    ),
    "llama4": partial(
        random_model, "llama4_text",
        **{**SMALL, "intermediate_size": 40}, **TOKENS, head_dim=24, intermediate_size_mlp=104, num_local_experts=4,
        num_experts_per_tok=2, moe_layers=[1, 2], no_rope_layers=[1, 0, 1], rope_parameters=YARN,
    ),
}  # fmt: skip


class Family:
    """A checkpoint on disk and the transformers model that wrote it."""

    def __init__(self, model: nn.Module, path: Path) -> None:
        self.model, self.path = model, path
        self.vocab_size: int = model.config.vocab_size
        self._references: dict[tuple[int, ...], tuple[list[int], torch.Tensor]] = {}
        """Prompt and number of tokens -> reference: several tests compare with the same."""

    def reference(self, prompt: list[int], tokens: int, guess: Sequence[int] = ()) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens, and the logits float32[tokens, vocab] they were chosen from: no cache, no batch.

        Args:
            guess: tokens that may be right: one forward pass tells how many are.
        """
        key = (tokens, *prompt)
        if key not in self._references:
            self._references[key] = self._generate(prompt, tokens, guess)
        return self._references[key]

    @torch.no_grad()
    def _generate(self, prompt: list[int], tokens: int, guess: Sequence[int]) -> tuple[list[int], torch.Tensor]:
        found, logits = list[int](), list[torch.Tensor]()
        while len(found) < tokens:
            ahead = guess[len(found) : tokens - 1]
            rows = self.model(torch.tensor([[*prompt, *found, *ahead]]), use_cache=False).logits[0, -1 - len(ahead) :]
            for row, guessed in zip_longest(rows.float(), ahead):
                logits.append(row)
                found.append(int(row.argmax()))
                if found[-1] != guessed:
                    break
        return found, torch.stack(logits)


def save(model: nn.Module, path: Path, max_shard_size: str = "1GB") -> Family:
    """`model` with biases and norms that matter, written to `path`."""
    for name, parameter in model.eval().named_parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=1.0 if name.endswith("norm.weight") else 0.0, std=0.3)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return Family(model, path)


@pytest.fixture(scope="session")
def make_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    made: dict[str, Family] = {}

    def make(name: str) -> Family:
        if name not in made:
            torch.manual_seed(7)
            made[name] = save(VARIANTS[name](), tmp_path_factory.mktemp(name), "40KB" if name == "qwen2" else "1GB")
        return made[name]

    return make


@pytest.fixture(params=VARIANTS)
def family(request: pytest.FixtureRequest, make_family: Callable[[str], Family]) -> Family:
    return make_family(request.param)


@pytest.fixture
def llama(make_family: Callable[[str], Family]) -> Family:
    return make_family("llama-tied")
