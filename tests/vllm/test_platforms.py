"""The choice of vLLM's build, and what its GPU build is refused; no GPU is needed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protocol.membership import Assignment, Speculation
from services.checkpoint import DEMO_MODEL
from services.config import WorkerConfig
from services.worker.backends.vllm import VllmRunner, vllm_api
from services.worker.backends.vllm.engine_config import EngineOptions
from services.worker.backends.vllm.platforms.choice import worker_platform
from services.worker.backends.vllm.platforms.gpu import GpuPlatform
from services.worker.backends.vllm.platforms.interface import WorkerPlatform
from services.worker.runner import SINGLE_GPU, LoadError


def config(**settings: Any) -> WorkerConfig:
    return WorkerConfig(model=str(DEMO_MODEL), backend="vllm", **settings)


def options(speculation: Speculation | None = None) -> EngineOptions:
    assignment = Assignment(1, 0, 1, 16, 8, 64, speculation=speculation)
    return EngineOptions(Path(), "bfloat16", config(device="cuda"), assignment)


def installed(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Make vLLM a build of this kind: "cpu", "cuda", or "" for a GPU build that finds no driver."""
    platform = SimpleNamespace(is_cpu=lambda: kind == "cpu", is_cuda=lambda: kind == "cuda")
    monkeypatch.setattr(vllm_api, "current_platform", platform)


@pytest.mark.parametrize(
    ("kind", "device", "message"),
    [
        ("cpu", "cuda", "--device cuda: .* is a build for CPUs; install vLLM's build for GPUs"),
        ("", "cuda", "finds no NVIDIA GPU with a driver; check nvidia-smi"),
        ("", "auto", "finds no NVIDIA GPU with a driver; check nvidia-smi"),
        ("cuda", "auto", "has never run: use --device cuda to try it"),
        ("cuda", "cpu", "has never run: use --device cuda to try it"),
    ],
)
def test_a_build_that_does_not_fit_the_device_is_refused(
    kind: str, device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, kind)
    with pytest.raises(LoadError, match=message):
        worker_platform(config(device=device))


def test_each_build_has_its_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "cpu")
    assert type(worker_platform(config())) is WorkerPlatform
    installed(monkeypatch, "cuda")
    chosen = worker_platform(config(device="cuda", gpu_memory_utilization=0.5, kv_cache_memory_bytes="1G"))
    assert chosen.arguments() == {
        "async_scheduling": True,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": 1 << 30,
    }


def test_the_share_of_the_memory_sets_the_size_of_the_cache() -> None:
    assert GpuPlatform(0.9, 0).arguments()["kv_cache_memory_bytes"] is None
    assert GpuPlatform(0.9, 0).measure(SimpleNamespace(determine_available_memory=lambda: 5 << 30)) == 5 << 30
    with pytest.raises(LoadError, match=r"--gpu-memory-utilization 0.1 leaves nothing .* 2.0 GiB are missing"):
        GpuPlatform(0.1, 0).measure(SimpleNamespace(determine_available_memory=lambda: -(2 << 30)))


def test_drafts_and_a_missing_compiler_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LoadError, match="--backend vllm computes no drafts on a GPU"):
        GpuPlatform(0.9, 0).check(None, options(Speculation("ngram", 2)))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(LoadError, match="there is no no-such-compiler: install one"):
        GpuPlatform(0.9, 0).check(None, options())


def test_a_gpu_is_one_rank() -> None:
    on_gpu = VllmRunner(config(device="cuda")).identify()
    assert (on_gpu.tensor_parallel_sizes, on_gpu.single_rank) == ((1,), SINGLE_GPU)
    assert len(VllmRunner(config()).identify().tensor_parallel_sizes) > 1


def test_graphs_are_captured_again_after_the_cache_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    dispatcher = SimpleNamespace(cudagraph_keys={"full": {1, 2}, "piecewise": {4}}, keys_initialized=True)
    GpuPlatform(0.9, 0).drop_graphs(SimpleNamespace(cudagraph_dispatcher=dispatcher))
    assert dispatcher.cudagraph_keys == {"full": set(), "piecewise": set()}
    assert not dispatcher.keys_initialized
