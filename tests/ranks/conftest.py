"""Rank processes that last as long as the session, and tiny checkpoints that can be cut into ranks."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.integration.native.conftest import SMALL, VARIANTS, Family, save
from tests.random_models import random_model
from tests.ranks.group import GroupDriver, NativeRankProcess, RankGroup
from tests.ranks.sim_group import group_fixture  # noqa: F401  the fixture `make_group`

DEEP = {**SMALL, "num_hidden_layers": 5}
"""Its stages are unequal, 211 token ids do not divide evenly, and two KV heads are fewer than four ranks."""
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "tied": partial(random_model, "llama", **DEEP, tie_word_embeddings=True),
    "untied-biased": partial(
        random_model, "llama", **DEEP, tie_word_embeddings=False, attention_bias=True, mlp_bias=True, head_dim=24
    ),
    "qwen3": partial(random_model, "qwen3", **DEEP, head_dim=32),
    "gemma3": VARIANTS["gemma3"],
    "gpt-oss": VARIANTS["gpt-oss"],
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


class RankPool:
    """Processes for any number of ranks; dead ones are replaced."""

    def __init__(self) -> None:
        self._processes: list[NativeRankProcess] = []

    def take(self, number: int) -> list[NativeRankProcess]:
        self._processes = [process for process in self._processes if process.alive]
        while len(self._processes) < number:
            self._processes.append(NativeRankProcess())
        return self._processes[:number]

    def discard(self, process: NativeRankProcess) -> None:
        self._processes.remove(process)

    def close(self) -> list[int]:
        """End all processes and return their exit statuses."""
        for process in self._processes:
            process.end()
        return [process.wait() for process in self._processes]


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    assert not any(pool.close()), "a rank exited with an error"


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    made: dict[str, Family] = {}

    def make(name: str) -> Family:
        if name not in made:
            torch.manual_seed(7)
            made[name] = save({**MODELS, **UNEQUAL}[name](), tmp_path_factory.mktemp(name))
        return made[name]

    return make


@pytest.fixture
def tied(make_model: Callable[[str], Family]) -> Family:
    return make_model("tied")


@pytest.fixture
def start(pool: RankPool) -> Callable[..., GroupDriver]:
    """Return start(model, tp, pp), which returns the driver of a group that has joined and loaded."""

    def start(model: Path, tp: int, pp: int, **options: object) -> GroupDriver:
        return GroupDriver(RankGroup(pool.take(tp * pp), model, tp, pp, **options), model)

    return start
