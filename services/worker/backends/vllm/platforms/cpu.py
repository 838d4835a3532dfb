"""vLLM's build for CPUs."""

import os
import shutil
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.backends.vllm.engine_config import EngineOptions
from services.worker.backends.vllm.parameters import RequestGenerator
from services.worker.backends.vllm.platforms.interface import HostArray
from services.worker.device.device_times import DeviceTime, past
from services.worker.runner import LoadError

CPU_BLOCK = 32
"""Tokens. vLLM's attention on the CPU requires a multiple of it as the size of a block."""


class CpuPlatform:
    """`WorkerPlatform`"""

    computes_here = True

    def arguments(self) -> dict[str, Any]:
        # Any value: `VllmEngine.allocate` sets the number of blocks.
        return {"kv_cache_memory_bytes": 1}

    def check(self, config: Any, options: EngineOptions) -> None:
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
        wrapper.determine_available_memory()  # compiles the model; in eager mode it computes nothing
        return 0

    def generator(self, seed: int, num_draws: int) -> torch.Generator:
        return RequestGenerator.after_draws(seed, num_draws)

    def drop_graphs(self, runner: Any) -> None:
        """Do nothing: vLLM records nothing on the CPU."""

    def index(self, tokens: NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(tokens)

    def download(self, tensor: torch.Tensor) -> HostArray:
        return tensor.numpy

    def now(self) -> DeviceTime:
        return past(time.monotonic())
