"""The native runner on a GPU: tokens of the processor, at every depth, and how often it waits."""

import pytest
import torch

from protocol.membership import Shard
from services.checkpoint import DEMO_MODEL
from services.config import WorkerConfig
from services.worker.backends.native.epoch_memory import epoch_memory
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.model import Model
from services.worker.backends.native.model.partition import ModelPart
from services.worker.backends.native.runner import NativeRunner
from services.worker.device.memory_plan import WORKSPACE
from services.worker.runner import SINGLE_GPU, LoadError
from services.worker.weights import open_checkpoint
from tests.benchmarks.gpu import parts
from tests.benchmarks.gpu.target import gpu
from tests.integration.native.driver import NUM_BLOCKS, GarblingRunner, RunnerDriver
from tests.integration.native.test_run_ahead import SPECULATIONS, TOKENS, serve


@pytest.mark.parametrize("speculation", SPECULATIONS)
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_tokens_are_equal_at_every_depth_on_a_gpu(eager: bool, speculation: str) -> None:
    expected = [each.output[:TOKENS] for each in serve(RunnerDriver(DEMO_MODEL, kernels="reference", device="cpu"), 1)]
    for depth in (1, 2, 3):
        config = WorkerConfig(model=str(DEMO_MODEL), device="cuda", dtype="float32", enforce_eager=eager)
        runner = GarblingRunner(config)
        drafter = SPECULATIONS[speculation]
        driver = RunnerDriver(DEMO_MODEL, runner=runner, speculation=drafter, keeps_logits=False)
        assert [each.output[:TOKENS] for each in serve(driver, depth)] == expected, depth
        runner.shutdown()


def test_a_second_epoch_records_graphs_again() -> None:
    """Also after the graphs of the first one are dropped."""
    runner = NativeRunner(WorkerConfig(model=str(DEMO_MODEL), device="cuda", dtype="float32"))
    answers = []
    for _ in range(2):
        driver = RunnerDriver(DEMO_MODEL, runner=runner, keeps_logits=False)
        answers.append([each.output[:TOKENS] for each in serve(driver, 2)])
    assert answers[0] == answers[1]
    runner.shutdown()


def test_an_epoch_allocates_no_more_than_its_account() -> None:
    part = ModelPart.from_shard(ModelConfig.from_checkpoint(DEMO_MODEL), Shard())
    kernels = gpu().make(torch.float32)
    model = Model(part, open_checkpoint(DEMO_MODEL), torch.float32, kernels, lambda *_: None)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    runner = NativeRunner(WorkerConfig(model=str(DEMO_MODEL), device="cuda", dtype="float32"))
    driver = RunnerDriver(DEMO_MODEL, runner=runner, speculation=SPECULATIONS["ngram"], keeps_logits=False)
    serve(driver, 2)
    uses = epoch_memory(model, driver.assignment, driver.max_model_len)
    accounted = model.num_bytes + NUM_BLOCKS * driver.loaded.bytes_per_block + sum(uses.values())
    assert torch.cuda.max_memory_allocated() - before <= accounted + WORKSPACE
    runner.shutdown()


def test_tokens_equal_those_of_the_reference_where_these_are_decided() -> None:
    result = parts.tokens(gpu())
    assert result["within"], result["rows"]


def test_a_decode_step_waits_for_no_gpu() -> None:
    """With drafts it waits twice: for the number of accepted drafts, and for the next ones."""
    for row in parts.syncs(gpu())["rows"]:
        assert row["synchronisations"] == 0, row
        assert row["event_waits"] <= (2 * row["steps"] if row["drafts"] else 0), row


def test_several_ranks_are_refused_by_name() -> None:
    runner = NativeRunner(WorkerConfig(model=str(DEMO_MODEL), device="cuda"))
    assert runner.identify().single_rank == SINGLE_GPU


def test_memory_that_is_too_small_is_refused_with_the_account() -> None:
    config = WorkerConfig(model=str(DEMO_MODEL), device="cuda", gpu_memory_utilization=0.001)
    with pytest.raises(LoadError, match="raise --gpu-memory-utilization above"):
        RunnerDriver(DEMO_MODEL, runner=NativeRunner(config))
