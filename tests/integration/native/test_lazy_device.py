"""The runner on a SIMULATED device whose streams do nothing until somebody waits (tests/unit/native/lazy_device.py)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from protocol.membership import Speculation
from protocol.sampling import Pooling, SamplingParams
from protocol.steps import GrammarOutput
from services.config import WorkerConfig
from services.worker.device.interface import HostCopy
from services.worker.runner import LoadError
from tests.integration.native.conftest import Family
from tests.integration.native.driver import GarblingRunner, RunnerDriver
from tests.integration.native.test_run_ahead import PROMPT, REQUESTS, SPECULATIONS, TOKENS, serve
from tests.matrix import covering
from tests.unit.native.lazy_device import LazyDevice
from tests.unit.native.lazy_kernels import LazyKernels, LazySampling

SPEEDS = {"lazy": frozenset[str](), "eager compute": frozenset({"compute"}), "eager copies": frozenset({"copies"})}


def driver_on(device: LazyDevice, family: Family, **options: Any) -> RunnerDriver:
    """A driver whose runner computes on the device."""
    config = WorkerConfig(model=str(family.path), threads=1, kernels="reference")
    runner = GarblingRunner(config, create_kernels=lambda choice: LazyKernels(choice.activations, device))
    return RunnerDriver(family.path, runner=runner, keeps_logits=False, **options)


def outputs(driver: RunnerDriver, depth: int) -> list[list[int]]:
    return [request.output[:TOKENS] for request in serve(driver, depth)]


@pytest.fixture(scope="module")
def expected(make_family: Callable[[str], Family]) -> list[list[int]]:
    return outputs(RunnerDriver(make_family("llama-tied").path, keeps_logits=False, kernels="reference"), 1)


@pytest.mark.parametrize(("speed", "speculation", "depth"), covering(list(SPEEDS), list(SPECULATIONS), (2, 3)))
def test_tokens_are_equal_at_every_depth_on_a_device(
    llama: Family, expected: list[list[int]], speed: str, speculation: str, depth: int
) -> None:
    """With drafts too, which are proposed and verified on the device."""
    device = LazyDevice(SPEEDS[speed])
    driver = driver_on(device, llama, speculation=SPECULATIONS[speculation])
    requests = serve(driver, depth)
    assert [request.output[:TOKENS] for request in requests] == expected
    assert bool(sum(request.drafted for request in requests)) == (speculation != "none")
    assert not device.hazards
    assert device.downloads >= driver.steps
    assert device.uploads > driver.steps
    assert [len(output) for output in expected] == [TOKENS] * len(REQUESTS)


def test_logprobs_and_embeddings_arrive_from_a_device(llama: Family) -> None:
    found = []
    for device in (None, LazyDevice()):
        options = {"kernels": "reference"} if device is None else {}
        driver = RunnerDriver(llama.path, keeps_logits=False, **options) if device is None else driver_on(device, llama)
        params = SamplingParams(max_tokens=9, temperature=0.0, logprobs=2, prompt_logprobs=1)
        requests = [driver.add(PROMPT, params), driver.add(PROMPT, pooling=Pooling.MEAN)]
        requests.append(driver.add(PROMPT[2:], pooling=Pooling.LAST))
        driver.generate(requests, 3, chunk=5, depth=2)
        found.append([(request.output, request.scores, request.embedding) for request in requests])
    for (output, scores, embedding), (device_output, device_scores, device_embedding) in zip(*found, strict=True):
        assert output == device_output
        assert scores.keys() == device_scores.keys()
        for at, score in scores.items():
            assert score.ids == device_scores[at].ids
            np.testing.assert_allclose(score.values, device_scores[at].values, atol=1e-5)
        values = [np.frombuffer(each, np.float32) for each in (embedding, device_embedding)]
        np.testing.assert_allclose(*values, atol=1e-5)
    assert len(found[0][0][1]) > len(PROMPT)


def test_a_bitmask_reaches_the_device(llama: Family) -> None:
    driver = driver_on(LazyDevice(), llama)
    request = driver.add(PROMPT)
    allowed = np.zeros(-(-driver.loaded.vocab_size // 32), np.int32)
    allowed[17 // 32] = 1 << (17 % 32)
    slots = np.array([request.slot], np.int32).tobytes()
    plan = driver.plan([(request, len(PROMPT))])
    plan = replace(plan, has_structured_output_requests=True, masked=slots)
    driver.runner.execute_model(plan)
    driver.runner.add_masks(GrammarOutput(1, plan.step_id, slots, allowed.tobytes()))
    result = driver.runner.sample_tokens(None).get()
    assert np.frombuffer(result.token_ids, np.int32).tolist() == [17]


class OneBuffer(LazySampling):
    """A planted fault: the sampled ids of all steps are in the same memory, like the output of a recorded graph."""

    def __init__(self, device: LazyDevice) -> None:
        super().__init__(device)
        self._ids = torch.zeros(64, dtype=torch.int32)

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        fresh, ids = super().greedy(logits), self._ids[: len(logits)]
        self._device.launch(lambda: ids.copy_(fresh))
        return ids


@pytest.mark.parametrize(("depth", "found"), [(1, False), (2, True)])
def test_memory_of_a_result_that_a_later_step_writes_is_found(llama: Family, depth: int, found: bool) -> None:
    device = LazyDevice(SPEEDS["eager compute"])
    kernels = LazyKernels(torch.float32, device)
    kernels.sampling = OneBuffer(device)
    config = WorkerConfig(model=str(llama.path), threads=1, kernels="reference")
    runner = GarblingRunner(config, create_kernels=lambda _: kernels)
    driver = RunnerDriver(llama.path, runner=runner, keeps_logits=False)
    request, flying = driver.add(PROMPT), []
    for count in (len(PROMPT), 1, 1):
        flying.append(driver.launch([(request, count)]))
        assert driver.epoch  # all that was launched is enqueued
        if len(flying) == depth:
            driver.collect(flying.pop(0))
    assert bool(device.hazards) == found


def test_a_result_that_does_not_wait_for_its_event_is_found(llama: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    device = LazyDevice()
    monkeypatch.setattr(device, "download", early)
    driver = driver_on(device, llama)
    request = driver.add(PROMPT)
    driver.generate([request], 2)
    assert max(request.output) < 0  # poison


def early(*tensors: torch.Tensor) -> HostCopy:
    """A planted fault: what is in memory now."""
    values = tuple(tensor.clone().numpy() for tensor in tensors)
    return lambda: values


def test_an_error_of_the_device_is_raised_with_its_step(llama: Family) -> None:
    device = LazyDevice()
    driver = driver_on(device, llama)
    request = driver.add(PROMPT)
    first = driver.launch([(request, len(PROMPT))])
    driver.collect(first)

    def fail() -> None:
        raise RuntimeError("CUDA out of memory")

    device.launch(fail)
    second = driver.launch([(request, 1)])
    with pytest.raises(RuntimeError, match="out of memory"):
        second.output.get()


@pytest.mark.parametrize("method", ["eagle", "eagle3", "draft_model"])
def test_drafters_with_a_model_on_a_device_are_refused_by_name(llama: Family, method: str) -> None:
    with pytest.raises(LoadError, match=f'no drafts of "method": "{method}" yet; use "ngram"'):
        driver_on(LazyDevice(), llama, speculation=Speculation(method, 2, "some/head"))
