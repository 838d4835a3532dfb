"""`--device`, the memory of a GPU, and what is refused by name. No GPU is needed."""

import pytest
import torch

from services.checkpoint import DEMO_MODEL
from services.config import WorkerConfig
from services.worker.backends.native.runner import NativeRunner
from services.worker.device.choice import device_kind
from services.worker.device.interface import DeviceMemory
from services.worker.device.memory_plan import WORKSPACE, MemoryPlan
from services.worker.kernels.selection import choose
from services.worker.runner import SINGLE_GPU, LoadError

GIB = 1 << 30


@pytest.mark.parametrize(("wanted", "has_gpu", "kind"), [
    ("auto", True, "cuda"), ("auto", False, "cpu"), ("cuda", True, "cuda"), ("cpu", True, "cpu"), ("cpu", False, "cpu"),
])  # fmt: skip
def test_auto_takes_a_gpu_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch, wanted: str, has_gpu: bool, kind: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert device_kind(wanted) == kind


@pytest.mark.parametrize(("cuda", "reason"), [
    (None, "is a build for CPUs; install a CUDA build of torch; use --device cpu"),
    ("13.0", "no NVIDIA GPU with a driver for CUDA 13.0; check nvidia-smi"),
])  # fmt: skip
def test_a_missing_gpu_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(LoadError, match=reason) as error:
        device_kind("cuda")
    assert "\n" not in str(error.value)


def test_the_kv_cache_gets_what_the_utilization_leaves() -> None:
    memory = DeviceMemory(total=80 * GIB, free=60 * GIB)
    plan = MemoryPlan(memory, 0.9, weights=16 * GIB, uses={"attention": GIB, "drafts": 0, "graphs": GIB})
    assert plan.cache == int(72 * GIB) - 16 * GIB - 2 * GIB - WORKSPACE
    assert MemoryPlan(memory, 0.9, 16 * GIB, {}, configured=GIB).cache == GIB
    account = plan.describe()
    for part in (
        "80.0 GiB",
        "90%",
        "weights 16.0 GiB",
        "others 4.0 GiB",
        "buffers 2.0 GiB (attention 1.0 GiB, graphs 1.0 GiB)",
    ):
        assert part in account


def test_a_gpu_without_room_is_refused_with_the_share_that_would_do() -> None:
    memory = DeviceMemory(total=80 * GIB, free=60 * GIB)
    with pytest.raises(LoadError, match=r"raise --gpu-memory-utilization above 0\.23"):
        _ = MemoryPlan(memory, 0.2, 16 * GIB, {"attention": 2 * GIB}).cache


def test_memory_that_others_use_does_not_count_against_the_share_but_must_be_free() -> None:
    """So a worker goes on with a smaller cache when another process has taken the rest."""
    memory = DeviceMemory(total=80 * GIB, free=4 * GIB)
    assert MemoryPlan(memory, 0.3, 16 * GIB, {"attention": GIB}).cache == 3 * GIB - WORKSPACE
    with pytest.raises(LoadError, match="end other processes that use the GPU"):
        _ = MemoryPlan(memory, 0.3, 16 * GIB, {"attention": 4 * GIB}).cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_a_gpu(dtype: torch.dtype) -> None:
    choice = choose("auto", "cuda", dtype, {"NVIDIA Example"}, eager=True)
    assert (choice.activations, choice.eager) == (dtype, True)
    assert choice.describe({"NVIDIA Example"}).startswith("kernels: compiled (cuda: NVIDIA Example); ")
    for refused in ({"quantized": True}, {"invariant": True}):
        with pytest.raises(LoadError, match="use --device cpu"):
            choose("auto", "cuda", dtype, {"NVIDIA Example"}, **refused)
    with pytest.raises(LoadError, match="use --device cpu"):
        choose("reference", "cuda", dtype, {"NVIDIA Example"})


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_worker_on_a_gpu_registers_why_it_can_have_no_other_ranks(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    identity = NativeRunner(WorkerConfig(model=str(DEMO_MODEL))).identify()
    assert identity.single_rank == (SINGLE_GPU if has_gpu else "")
    assert (identity.tensor_parallel_sizes == (1,)) == (identity.max_pipeline_parallel_size == 1) == has_gpu
