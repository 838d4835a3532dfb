"""Rank processes that outlive a test, and tiny checkpoints with enough layers and heads to be cut."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tests.integration.native.conftest import SMALL, Family, save
from tests.ranks.group import Group, GroupDriver, Process

DEEP = {**SMALL, "num_hidden_layers": 5}
"""Stages of it are unequal; 211 token ids do not divide evenly; two KV heads are fewer than four ranks."""
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**DEEP, tie_word_embeddings=True)),
    "untied-biased": lambda: LlamaForCausalLM(
        LlamaConfig(**DEEP, tie_word_embeddings=False, attention_bias=True, mlp_bias=True, head_dim=24)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**DEEP, head_dim=32)),
}
LAYOUTS = [(2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]
"""Tensor-parallel ranks x pipeline stages."""


class Pool:
    """Processes for as many ranks as are asked for; dead ones are replaced."""

    def __init__(self) -> None:
        self._processes: list[Process] = []

    def take(self, number: int) -> list[Process]:
        self._processes = [process for process in self._processes if process.alive]
        while len(self._processes) < number:
            self._processes.append(Process())
        return self._processes[:number]

    def discard(self, process: Process) -> None:
        self._processes.remove(process)

    def close(self) -> list[int]:
        """Exit statuses."""
        for process in self._processes:
            process.end()
        return [process.wait() for process in self._processes]


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    assert not any(pool.close()), "a rank did not end well"


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    made: dict[str, Family] = {}

    def make(name: str) -> Family:
        if name not in made:
            torch.manual_seed(7)
            made[name] = save(MODELS[name](), tmp_path_factory.mktemp(name))
        return made[name]

    return make


@pytest.fixture
def tied(make_model: Callable[[str], Family]) -> Family:
    return make_model("tied")


@pytest.fixture
def start(pool: Pool) -> Callable[..., GroupDriver]:
    """start(model, tp, pp): a group that has joined and loaded."""

    def start(model: Path, tp: int, pp: int, **options: object) -> GroupDriver:
        return GroupDriver(Group(pool.take(tp * pp), model, tp, pp, **options), model)

    return start
