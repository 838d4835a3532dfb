"""vLLM's asynchronous model runner, as on a GPU, computing on the CPU: the answers of the synchronous one.

Streams and events are SIMULATED: everything enqueued has run. What is real is vLLM's bookkeeping, in which the tokens
of a step are placeholders, and the translation that has to replace them.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from protocol.sampling import Pooling, SamplingParams
from services.config import WorkerConfig
from services.scheduler.capabilities import refusal, table
from services.worker.backends.vllm.engine_config import EngineOptions
from services.worker.backends.vllm.platforms.interface import WorkerPlatform
from tests.vllm.driver import VllmRun, VllmStream, VllmWorker
from tests.vllm.parameter_cases import (
    FEW_BLOCKS,
    PARAMETER_CASES,
    SAMPLED,
    all_streams,
    assert_all_equal,
    each_depth,
    prompt_of,
)

ONE = SamplingParams(max_tokens=1, temperature=0.0)


class PassedEvent:
    """An event behind which everything has run."""

    def __init__(self, *args: object, **settings: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class IdleStream:
    """A stream whose work runs when it is enqueued."""

    def __init__(self, *args: object, **settings: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass


class AsynchronousCpu(WorkerPlatform):
    """vLLM's CPU worker with the asynchronous output of its GPU worker."""

    def check(self, config: Any, options: EngineOptions) -> None:
        super().check(config, options)
        config.scheduler_config.async_scheduling = True


def asynchronous(config: WorkerConfig) -> AsynchronousCpu:
    return AsynchronousCpu()


@pytest.fixture(scope="module")
def expected() -> dict[str, VllmStream]:
    """Answers of the synchronous runner at depth one."""
    worker = VllmWorker()
    with VllmRun(worker, 1, prefix_caching=False) as run:
        streams = run.serve(*all_streams())
    worker.runner.shutdown()
    return dict(zip(PARAMETER_CASES, streams, strict=True))


@pytest.fixture(scope="module")
def worker(expected: dict[str, VllmStream]) -> Iterator[VllmWorker]:
    """A process has one vLLM at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", PassedEvent)
        patch.setattr(torch.cuda, "Stream", IdleStream)
        patch.setattr(torch.cuda, "current_stream", IdleStream)
        patch.setattr(torch.cuda, "stream", nullcontext)
        worker = VllmWorker(create_platform=asynchronous)
        worker.leaves_rows_out = False  # as on a GPU
        yield worker
        worker.runner.shutdown()


@each_depth
def test_answers_equal_those_of_the_synchronous_runner(
    depth: int, worker: VllmWorker, expected: dict[str, VllmStream]
) -> None:
    with VllmRun(worker, depth, prefix_caching=depth > 1) as run:
        assert_all_equal(run.serve(*all_streams()), expected.values())
        assert worker.runner.engine.runner.use_async_scheduling


@each_depth
def test_preemption_storm_changes_no_answer(depth: int, worker: VllmWorker, expected: dict[str, VllmStream]) -> None:
    """A resumed request enters vLLM's batch with its tokens."""
    with VllmRun(worker, depth, num_blocks=FEW_BLOCKS) as run:
        assert_all_equal(run.serve(*all_streams()), expected.values())
        assert run.core.stats()["num_preemptions"] >= 3


CELLS = [
    cell
    for cell, reason in table()
    if cell.backend == "vllm" and not cell.speculation and not cell.structured and reason is None
]


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.batching_policy != "chunked"], ids=str)
def test_requests_that_pause_between_steps_have_their_tokens(
    cell: Any, worker: VllmWorker, expected: dict[str, VllmStream]
) -> None:
    """Policies leave requests out of steps: vLLM removes these from its batch, and adds them again later."""
    assert refusal(replace(cell, structured=True)) is None
    with VllmRun(worker, 1 + 2 * cell.runs_ahead, policy=cell.batching_policy) as run:
        assert_all_equal(run.serve(*all_streams()), expected.values())


def test_a_release_between_steps_changes_no_answer(worker: VllmWorker, expected: dict[str, VllmStream]) -> None:
    """A step without rows empties vLLM's batch, while the tokens of the step before are on their way."""
    wanted = [stream for stream in expected.values() if stream.structured is None]
    with VllmRun(worker, 2) as run:
        streams = [stream for stream in all_streams() if stream.structured is None]
        for number, stream in enumerate(streams):
            run.add(number, stream)
        while run.core.requests:
            run.run_step()
            worker.runner.release(np.zeros(0, np.int32))
        run.finish()
    assert_all_equal(streams, wanted)


def test_embeddings_in_one_batch_with_generation(worker: VllmWorker) -> None:
    def streams() -> list[VllmStream]:
        pooled = [VllmStream(prompt_of(n, 90), ONE, pooling=Pooling.MEAN) for n in range(3)]
        return [*pooled, VllmStream(prompt_of(4, 50), SAMPLED)]

    embeddings = []
    for depth in (1, 3):
        with VllmRun(worker, depth) as run:
            embeddings.append([value for each in run.serve(*streams()) for value in each.embedding])
    assert embeddings[0]
    assert embeddings[1] == pytest.approx(embeddings[0], abs=1e-4)
