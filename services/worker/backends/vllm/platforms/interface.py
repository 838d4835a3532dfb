"""The device that vLLM's worker computes on, as the backend uses it; with vLLM's build for CPUs."""

import os
import shutil
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.backends.vllm.engine_config import EngineOptions
from services.worker.backends.vllm.parameters import RequestGenerator
from services.worker.device.device_times import DeviceTime, past
from services.worker.runner import LoadError

CPU_BLOCK = 32
"""Tokens. vLLM's attention on the CPU requires a multiple of it as the size of a block."""
HostArray = Callable[[], NDArray[np.float32]]
"""Waits for a copy, and returns it."""


class WorkerPlatform:
    """The device of one rank, as vLLM's worker uses it; this one is the processor, where a call of vLLM returns when it
    is computed. For one calling thread, unless stated."""

    computes_here = True
    """The threads of this process compute the steps."""

    def arguments(self) -> dict[str, Any]:
        """Return settings for vLLM's `EngineArgs`."""
        # Any value: `VllmEngine.allocate` sets the number of blocks.
        return {"kv_cache_memory_bytes": 1}

    def check(self, config: Any, options: EngineOptions) -> None:
        """Check and complete vLLM's `VllmConfig`. Raises: LoadError, for what this device cannot do."""
        block_size = options.assignment.block_size
        if block_size % CPU_BLOCK and not config.model_config.use_mla:
            raise LoadError(
                f"--block-size {block_size} is not a multiple of {CPU_BLOCK}, which vLLM's attention on the CPU "
                f"requires; start the scheduler with --block-size {-(-block_size // CPU_BLOCK) * CPU_BLOCK}"
            )
        compiler = os.environ.get("CXX", "g++")
        if not options.config.enforce_eager and shutil.which(compiler) is None:
            raise LoadError(f"vLLM compiles the model, but there is no {compiler}: install it or use --enforce-eager")

    def measure(self, wrapper: Any) -> int:
        """Let vLLM's worker compile the model and measure its memory, where it does so.

        Returns: bytes for the KV cache; 0: the host's memory has them.

        Raises: LoadError, if nothing remains for the KV cache.
        """
        wrapper.determine_available_memory()  # compiles the model; in eager mode it computes nothing
        return 0

    def generator(self, seed: int, num_draws: int) -> torch.Generator:
        """Return the random numbers of a request that has `num_draws` output tokens: one draw for each token."""
        return RequestGenerator.after_draws(seed, num_draws)

    def drop_graphs(self, runner: Any) -> None:
        """Drop what vLLM's model runner has recorded over the KV cache, before the cache is dropped."""

    def index(self, tokens: NDArray[np.integer]) -> torch.Tensor:
        """Return int64[tokens] on the device."""
        return torch.from_numpy(tokens)

    def download(self, tensor: torch.Tensor) -> HostArray:
        """Copy float32 values to the host, after everything enqueued so far. The result is for any thread."""
        return tensor.numpy

    def now(self) -> DeviceTime:
        """Return the point in time after everything enqueued so far."""
        return past(time.monotonic())
