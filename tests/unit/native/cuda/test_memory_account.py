"""The account of a device's memory against what a runner allocates.

Kernels only write zeros here: they allocate nothing, and the interpreter would compute for minutes.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from protocol.membership import InitializeCache, Shard, Speculation
from protocol.sampling import Pooling, SamplingParams
from services.config import WorkerConfig
from services.worker.backends.native.epoch_memory import epoch_memory
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.model import Model
from services.worker.backends.native.model.partition import ModelPart
from services.worker.backends.native.runner import NativeRunner
from services.worker.device.cuda import UploadedMirror
from services.worker.device.interface import DeviceMemory, DeviceMirror
from services.worker.kernels.cuda.kernels import CudaKernels
from services.worker.weights import open_checkpoint
from tests.integration.native.driver import NUM_BLOCKS, DrivenRequest, RunnerDriver
from tests.unit.native.cuda.tiny_engine import write_tiny_model
from tests.unit.native.eagle_heads import HIDDEN, VOCAB
from tests.unit.native.interpreted import CopyingDevice

TOTAL = 4 << 30
DRAFTS = Speculation("ngram", 2, prompt_lookup_min=1, prompt_lookup_max=3)
KEPT = ("forward pass", "attention", "token history", "block table")
"""Uses that are allocated with the KV cache."""


class Allocations:
    """Memory of tensors that torch has allocated and not freed yet, bytes."""

    def __init__(self) -> None:
        self._allocated: dict[StorageWeakRef, int] = {}
        self.most = 0

    def add(self, storage: torch.UntypedStorage) -> None:
        self._allocated.setdefault(StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, self.live)

    @property
    def live(self) -> int:
        self._allocated = {each: size for each, size in self._allocated.items() if not each.expired()}
        return sum(self._allocated.values())


class Watching(TorchDispatchMode):
    """Enters what the operations of a thread allocate into a list."""

    def __init__(self, allocations: Allocations) -> None:
        super().__init__()
        self._allocations = allocations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_memory(each) for each in tree_leaves((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and _memory(each) not in given:
                self._allocations.add(each.untyped_storage())
        return result


def _memory(value: object) -> int:
    """Return the address of a tensor's memory; 0 for other values."""
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().data_ptr()
    return value.data_ptr() if isinstance(value, torch.UntypedStorage) else 0


class CountedMemory(CopyingDevice):
    """A device with memory of its own, whose memory is counted."""

    is_host = False

    def __init__(self) -> None:
        self.allocations = Allocations()

    def working(self) -> AbstractContextManager[None]:
        return Watching(self.allocations)

    def upload(self, *columns: NDArray[Any]) -> tuple[torch.Tensor, ...]:
        return tuple(column.clone() for column in super().upload(*columns))

    def mirror(self, array: NDArray[Any]) -> DeviceMirror:
        mirror = UploadedMirror(self, array)
        mirror.tensor = mirror.tensor.clone()
        return mirror

    def memory(self) -> DeviceMemory:
        return DeviceMemory(TOTAL, TOTAL - self.allocations.live)


class CountedRunner(NativeRunner):
    """Counts what an epoch allocates."""

    def __init__(self, model: Path, dtype: str = "float32") -> None:
        self.device = CountedMemory()
        self.kernels = CudaKernels(getattr(torch, dtype), self.device)
        config = WorkerConfig(model=str(model), threads=1, kernels="reference", dtype=dtype)
        super().__init__(config, create_kernels=lambda _: self.kernels)

    def init_kv_cache(self, init: InitializeCache) -> None:
        with Watching(self.device.allocations):
            super().init_kv_cache(init)


def everything(slot: int) -> SamplingParams:
    """Parameters that use all memory of sampling."""
    return SamplingParams(
        max_tokens=50, temperature=1.0, seed=slot, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2,
        logit_bias=((3, 1.0),), bad_words=((2, 3),), allowed_token_ids=np.arange(VOCAB, dtype=np.int32).tobytes(),
        logprobs=5, prompt_logprobs=5,
    )  # fmt: skip


def serve_everything(driver: RunnerDriver) -> None:
    """Serve requests that use all memory: whole prompts in one step, with and without drafts, and embeddings."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, 85).tolist() for _ in range(14)]
    requests = [driver.add(prompt, everything(slot)) for slot, prompt in enumerate(prompts)]
    driver.generate(requests, 6, depth=2)
    assert sum(request.drafted for request in requests) > 0
    assert all(len(request.scores) >= 84 + 6 for request in requests)
    for request in requests:
        driver.finish(request)
    pooled: list[DrivenRequest] = [driver.add(prompt[:32], pooling=Pooling.MEAN) for prompt in prompts]
    driver.step([(request, 32) for request in pooled])
    assert all(request.embedding for request in pooled)


def write_zeros(kernel: InterpretedFunction[Any], *args: Any, **keywords: Any) -> None:
    """Take the place of a launch."""
    for each in args:
        if isinstance(each, torch.Tensor):
            each.zero_()


def test_every_kernel_of_sampling_is_compiled_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def record(kernel: InterpretedFunction[Any], *args: Any, **keywords: Any) -> None:
        names.append(kernel.__name__)
        write_zeros(kernel, *args, **keywords)  # torch reads results as indices

    monkeypatch.setattr(InterpretedFunction, "run", record)
    runner = CountedRunner(write_tiny_model(tmp_path))
    RunnerDriver(Path(), runner=runner, keeps_logits=False)
    rules = {"mask_kernel", "forbid_words_kernel", "bias_kernel", "count_kernel", "penalize_kernel"}
    assert set(names) == rules | {"best_kernel", "cutoff_kernel"}
    runner.shutdown()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_account_has_everything_that_a_runner_allocates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(InterpretedFunction, "run", write_zeros)
    directory = write_tiny_model(tmp_path)
    runner = CountedRunner(directory, dtype)
    driver = RunnerDriver(Path(), runner=runner, speculation=DRAFTS, keeps_logits=False)
    part, allocations = (
        ModelPart.from_shard(ModelConfig.from_checkpoint(directory), Shard()),
        runner.device.allocations,
    )
    model = Model(part, open_checkpoint(directory), getattr(torch, dtype), runner.kernels, lambda *_: None)
    uses = epoch_memory(model, driver.assignment, driver.max_model_len)
    cache = NUM_BLOCKS * driver.loaded.bytes_per_block
    sums = driver.assignment.num_slots * HIDDEN * 4  # of embeddings; the rest of their use is a step's
    kept = allocations.live - cache
    counts = VOCAB * 4 + 4  # of penalties and programs, for the row that is sampled to compile
    assert kept == sum(uses[name] for name in KEPT) + sums + counts
    serve_everything(driver)
    assert kept < allocations.most - cache <= sum(uses.values())
    of_steps = sum(size for name, size in uses.items() if name not in KEPT)
    assert allocations.most - cache - kept > of_steps / 4, "the account is far too large"
    logits, converted = torch.empty(uses["raw logits"] // (4 * VOCAB), VOCAB), Allocations()
    states = torch.empty(len(logits), model.config.hidden_size, dtype=runner.kernels.network.activations)
    with Watching(converted):
        model.head(states, logits)
    assert converted.most == uses["logits"]
    runner.shutdown()
