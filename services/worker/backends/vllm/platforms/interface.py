"""The device that vLLM's worker computes on, as the backend uses it; with vLLM's build for CPUs."""

import os
import shutil
from typing import Any

import torch

from services.worker.backends.vllm.engine_config import EngineOptions
from services.worker.backends.vllm.parameters import RequestGenerator
from services.worker.device.interface import ComputeDevice
from services.worker.runner import LoadError

CPU_BLOCK = 32
"""Tokens. vLLM's attention on the CPU requires a multiple of it as the size of a block."""


class WorkerPlatform(ComputeDevice):
    """The device of one rank, as vLLM's worker uses it; this one is the processor, where a call of vLLM returns when it
    is computed. For one calling thread, unless stated. Of a `ComputeDevice` only `upload`, `download` and `now` are
    used: vLLM does the rest."""

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
