"""The interface of the backend to the device that vLLM's worker computes on."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.backends.vllm.engine_config import EngineOptions
from services.worker.device.device_times import DeviceTime

HostArray = Callable[[], NDArray[np.float32]]
"""Waits for a copy, and returns it."""


class WorkerPlatform(Protocol):
    """The device of one rank, as vLLM's worker uses it. For one calling thread, unless stated."""

    computes_here: bool
    """The threads of this process compute the steps."""

    def arguments(self) -> dict[str, Any]:
        """Return settings for vLLM's `EngineArgs`."""
        ...

    def check(self, config: Any, options: EngineOptions) -> None:
        """Check and complete vLLM's `VllmConfig`. Raises: LoadError, for what this device cannot do."""
        ...

    def measure(self, wrapper: Any) -> int:
        """Let vLLM's worker compile the model and measure its memory, where it does so.

        Returns: bytes for the KV cache; 0: the host's memory has them.

        Raises: LoadError, if nothing remains for the KV cache.
        """
        ...

    def generator(self, seed: int, num_draws: int) -> torch.Generator:
        """Return the random numbers of a request that has `num_draws` output tokens: one draw for each token."""
        ...

    def drop_graphs(self, runner: Any) -> None:
        """Drop what vLLM's model runner has recorded over the KV cache, before the cache is dropped."""
        ...

    def index(self, tokens: NDArray[np.integer]) -> torch.Tensor:
        """Return int64[tokens] on the device."""
        ...

    def download(self, tensor: torch.Tensor) -> HostArray:
        """Copy float32 values to the host, after everything enqueued so far. The result is for any thread."""
        ...

    def now(self) -> DeviceTime:
        """Return the point in time after everything enqueued so far."""
        ...
