"""int8 and int4 weights, and batch invariance beyond float32, in whole models."""

import copy
import logging
from typing import Any

import pytest
import torch

from protocol.membership import Shard
from protocol.sampling import SamplingParams
from services.checkpoint import DEMO_MODEL
from services.config import WorkerConfig
from services.worker.backends.native.kept_model import KeptModel
from services.worker.backends.native.runner import NativeRunner
from services.worker.kernels import selection
from services.worker.kernels.interface.kernels import Kernels
from services.worker.kernels.quantized_weight import quantized
from services.worker.kernels.selection import TILES, KernelChoice
from services.worker.runner import LoadError
from tests.integration.native.conftest import SMALL, Family, save
from tests.integration.native.conftest import TOKENS as EOS
from tests.integration.native.driver import RunnerDriver
from tests.random_models import random_model

TOKENS = 12
PARAMS = SamplingParams(max_tokens=100, temperature=0.9, seed=7, logprobs=3, prompt_logprobs=1)
MODES = [("bfloat16", None), ("bfloat16", "int8"), ("float32", "int4")]
each_mode = pytest.mark.parametrize(("dtype", "quantization"), MODES)


@pytest.fixture(scope="module", params=["llama", "llama4_text"])
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Sizes are multiples of 32, and so large that oneDNN chooses the order of sums by the number of rows."""
    torch.manual_seed(0)
    sizes = {**SMALL, "hidden_size": 576, "intermediate_size": 1536, "vocab_size": 600, "initializer_range": 0.05}
    if request.param == "llama4_text":
        sizes |= {**EOS, "intermediate_size": 512, "intermediate_size_mlp": 1536, "moe_layers": [1, 2]}
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2, "no_rope_layers": [1, 0, 1]}
    model = random_model(request.param, **sizes, tie_word_embeddings=True, head_dim=64)
    return save(model, tmp_path_factory.mktemp("wide") / "model")


def prompts() -> list[list[int]]:
    lengths = [1, 40, 7, 33, 16, 21, 64, 3]
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 600, (length,), generator=generator).tolist() for length in lengths]


Answer = tuple[list[int], dict[int, object]]


def answers(driver: RunnerDriver, batch: int, chunk: int, depth: int) -> list[Answer]:
    """Tokens and log-probabilities of every prompt, computed `batch` at a time."""
    found: list[Answer] = []
    for first in range(0, len(prompts()), batch):
        requests = [driver.add(prompt, PARAMS) for prompt in prompts()[first : first + batch]]
        driver.generate(requests, TOKENS, chunk, depth)
        found += [(request.output, dict(request.scores)) for request in requests]
        for request in requests:
            driver.finish(request)
            driver.free_blocks += request.blocks
    return found


@each_mode
def test_batches_chunks_and_steps_in_flight_change_no_bit(wide: Family, dtype: str, quantization: str | None) -> None:
    """The bits of tokens and of all log-probabilities. Quantised weights keep the promise without the flag."""
    settings = {"dtype": dtype, "quantization": quantization, "batch_invariant": quantization is None}
    driver = RunnerDriver(wide.path, **settings)
    alone = answers(driver, batch=1, chunk=10_000, depth=1)
    assert len({tuple(tokens) for tokens, _ in alone}) == len(alone)
    for batch, chunk, depth in ((8, 10_000, 1), (8, 5, 2), (3, 17, 3)):
        assert answers(driver, batch, chunk, depth) == alone
    two_threads = RunnerDriver(wide.path, threads=2, **settings)
    assert answers(two_threads, batch=8, chunk=31, depth=2) == alone


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_logits_equal_transformers_on_the_dequantised_weights(wide: Family, quantization: str) -> None:
    dequantised = Family(copy.deepcopy(wide.model), wide.path)
    for name, parameter in dequantised.model.named_parameters():
        kind = "int8" if "embed" in name or quantization == "int8" else "int4"
        if parameter.dim() == 2 and "router" not in name:
            parameter.data = quantized(parameter.data, kind).dequantized()
        for expert in parameter.data if parameter.dim() == 3 else ():
            expert.copy_(quantized(expert.t(), kind).dequantized().t())
    driver = RunnerDriver(wide.path, quantization=quantization, dtype="float32")
    reference = RunnerDriver(wide.path, quantization=quantization, dtype="float32", kernels="reference")
    for each in (driver, reference):
        for prompt in prompts()[:2]:
            each.logits.clear()
            request = each.add(prompt)
            each.generate([request], TOKENS)
            tokens, logits = dequantised.reference(prompt, TOKENS, request.output)
            assert request.output == tokens
            # Our product rounds activations to whole numbers
            close = 5e-3 if each is driver else 1e-3
            torch.testing.assert_close(torch.cat(each.logits), logits, atol=close, rtol=0)


def test_weights_are_in_memory_once(caplog: pytest.LogCaptureFixture) -> None:
    """The demo model's head is its embedding; the log tells the memory of all weights."""
    layers, table = 4 * 192 * (2 * 256 + 2 * 128 + 3 * 512), 4096 * 192
    for quantization, bits in (("int8", 8.5), ("int4", 5)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "runahead.worker"):
            RunnerDriver(DEMO_MODEL, quantization=quantization)
        [line] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("weights: ")]
        kinds = "Q8_0" if quantization == "int8" else "Q4_1 and Q8_0"
        assert line == f"weights: {(layers * bits + table * 8.5) / 8 / 2**20:.1f} MiB in {kinds}"


def test_the_performance_mode_chooses_the_products_of_quantised_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "processor_features", lambda: frozenset({TILES}))
    chosen: list[bool] = []

    def create(choice: KernelChoice) -> Kernels:
        chosen.append(choice.few_rows)
        raise LoadError("chosen")

    for mode in ("balanced", "throughput"):
        config = WorkerConfig(model=str(DEMO_MODEL), dtype="bfloat16", quantization="int8", performance_mode=mode)
        with pytest.raises(LoadError, match="chosen"):
            KeptModel(config, create).weights(Shard(), lambda phase, fraction: None)
    assert chosen == [True, False]


def test_ranks_agree_on_settings_that_change_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(**settings: Any) -> str:
        return NativeRunner(WorkerConfig(model=str(DEMO_MODEL), **settings)).identify().model_hash

    settings = [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"batch_invariant": True}]
    assert len({digest(**some) for some in settings}) == len(settings)
    for features in (frozenset({TILES}), frozenset[str]()):
        monkeypatch.setattr(selection, "processor_features", lambda found=features: found)
        for weights in ("none", "int8"):
            modes = {
                digest(dtype="bfloat16", quantization=weights, performance_mode=mode)
                for mode in ("balanced", "interactivity", "throughput")
            }
            assert len(modes) == 1 + (weights == "int8" and TILES in features), "only AMX has two products for int8"


def test_cuts_through_a_group_are_refused_with_the_sizes_that_work() -> None:
    runner = NativeRunner(WorkerConfig(model=str(DEMO_MODEL), quantization="int4"))
    assert runner.identify().tensor_parallel_sizes == (1, 2, 4)


def test_sizes_that_are_no_multiple_of_a_group_are_refused(llama: Family) -> None:
    runner = NativeRunner(WorkerConfig(model=str(llama.path), quantization="int8"))
    with pytest.raises(LoadError, match="in groups of 32 inputs, but this model has products with 64, 64, 104 inputs"):
        runner.identify()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "awq"}, "--quantization awq: --backend native has int8, int4, none"),
        ({"quantization": "int8", "backend": "sim"}, "--quantization int8: --backend sim has no weights"),
        ({"quantization": "int4", "backend": "vllm"}, "int4 is a type of --backend native, not a method of vLLM"),
        ({"batch_invariant": True, "backend": "vllm"}, "--batch-invariant .* --backend vllm does not use it"),
        ({"batch_invariant": True, "kernels": "reference"}, "--kernels reference does not give this promise"),
    ],
)
def test_values_of_other_backends_are_refused_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorkerConfig.model_validate(settings)
    assert WorkerConfig(backend="vllm", quantization="awq").quantization == "awq"
