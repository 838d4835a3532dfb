"""A whole model and its sampler on interpreted kernels against the reference, in float32."""

from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.kernels.interface.kernels import Kernels
from services.worker.runner import LoadError
from tests.integration.native.conftest import VARIANTS, save
from tests.unit.native.cuda.tiny_engine import TinyEngine, write_tiny_model
from tests.unit.native.eagle_heads import VOCAB
from tests.unit.native.interpreted import CountedGraphs, interpreted_kernels

Step = list[tuple[int, int, int, bool]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, VOCAB, length).tolist()


def fill(engine: TinyEngine) -> None:
    engine.add(0, prompt(13))
    engine.add(1, prompt(5), temperature=0.8, top_p=0.9, seed=3, logprobs=3)
    engine.add(2, prompt(1), temperature=1.2, top_k=20, repetition_penalty=1.3, frequency_penalty=0.4, seed=4)
    engine.add(3, prompt(9), temperature=1.0, min_p=0.05, seed=2**63, logit_bias=((7, 2.0), (9, -4.0)))


STEPS: list[Step] = [
    [(0, 0, 9, False), (1, 0, 5, True)],
    [(0, 9, 4, True), (1, 5, 1, True), (2, 0, 1, True), (3, 0, 9, True)],
    [(0, 13, 1, True), (1, 6, 1, True), (2, 1, 1, True), (3, 9, 1, True)],
    [(3, 10, 1, True), (0, 14, 1, True), (1, 7, 1, True)],
    [(2, 2, 1, True)],
]


def assert_equal_steps(engines: tuple[TinyEngine, TinyEngine], steps: list[Step]) -> None:
    for step in steps:
        ours, theirs = (engine.step(step) for engine in engines)
        torch.testing.assert_close(engines[0].logits, engines[1].logits, atol=1e-4, rtol=1e-4)
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert (ours.logprobs is None) == (theirs.logprobs is None)


@torch.inference_mode()
def test_tokens_equal_the_reference(model: Path) -> None:
    engines = TinyEngine(model, interpreted_kernels()), TinyEngine(model, Kernels(torch.float32))
    for engine in engines:
        fill(engine)
    assert_equal_steps(engines, STEPS)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gemma3", "olmo3-yarn", "phi3-longrope-partial"])
def test_logits_of_other_architectures_equal_the_reference(tmp_path: Path, name: str) -> None:
    torch.manual_seed(7)
    path = save(VARIANTS[name](), tmp_path).path
    engines = TinyEngine(path, interpreted_kernels()), TinyEngine(path, Kernels(torch.float32))
    for engine in engines:
        engine.add(0, prompt(13))
        engine.add(1, prompt(5))
    assert_equal_steps(engines, [[(0, 0, 9, False), (1, 0, 5, True)], [(0, 9, 4, True), (1, 5, 1, True)]])


def test_mixtures_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="mixtures of experts are not computed on this device; use --device cpu"):
        TinyEngine(save(VARIANTS["qwen3-moe"](), tmp_path).path, interpreted_kernels())


@torch.inference_mode()
def test_a_replayed_graph_with_padding_rows_computes_the_same(model: Path) -> None:
    """Nine decode rows replay a graph of twelve."""
    graphs = CountedGraphs()
    engines = TinyEngine(model, interpreted_kernels(graphs=graphs)), TinyEngine(model, Kernels(torch.float32))
    for engine in engines:
        for slot in range(9):
            engine.add(slot, [slot])
    assert_equal_steps(engines, [[(slot, position, 1, True) for slot in range(9)] for position in range(3)])
    assert (graphs.captures, graphs.replays) == (1, 2)
