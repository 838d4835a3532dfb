"""vLLM's build for NVIDIA GPUs. Nothing here was run on one yet; the tests check the calls by vLLM's signatures."""

import os
import shutil
from typing import Any

import torch
from numpy.typing import NDArray

from services.units import size_text
from services.worker.backends.vllm import vllm_api
from services.worker.backends.vllm.engine_config import EngineOptions
from services.worker.backends.vllm.platforms.interface import WorkerPlatform
from services.worker.device.cuda import downloaded
from services.worker.device.device_times import DeviceTime, StreamTimes
from services.worker.device.interface import HostCopy
from services.worker.runner import LoadError

OFFSETS_PER_DRAW = 4
"""Steps of a generator on a GPU that vLLM takes for one row's noise; vLLM takes back as many for a discarded draw."""


class GpuPlatform(WorkerPlatform):
    """vLLM's worker on a GPU.

    Args:
        utilization: share of the GPU's memory for everything (`--gpu-memory-utilization`)
        cache_bytes: size of the KV cache instead; 0: what the share leaves
    """

    is_host = False
    where = torch.device("cuda")

    def __init__(self, utilization: float, cache_bytes: int) -> None:
        self._utilization, self._cache_bytes = utilization, cache_bytes
        self._times = StreamTimes()

    def arguments(self) -> dict[str, Any]:
        return {
            "async_scheduling": True,
            "gpu_memory_utilization": self._utilization,
            "kv_cache_memory_bytes": self._cache_bytes or None,
        }

    def check(self, config: Any, options: EngineOptions) -> None:
        if options.assignment.speculation is not None:
            raise LoadError(
                "--speculative-config: --backend vllm computes no drafts on a GPU; remove it, or use --backend native"
            )
        compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
        if not any(map(shutil.which, compilers)):
            raise LoadError(f"Triton needs a C compiler, but there is no {' or '.join(compilers)}: install one")

    def measure(self, wrapper: Any) -> int:
        """vLLM computes the largest step and estimates the size of its CUDA graphs."""
        available = int(wrapper.determine_available_memory())
        if available <= 0:
            raise LoadError(
                f"--gpu-memory-utilization {self._utilization} leaves nothing for the KV cache beside weights and "
                f"buffers; {size_text(-available)} are missing: raise it, or lower --max-num-batched-tokens"
            )
        return available

    def generator(self, seed: int, num_draws: int) -> torch.Generator:
        generator = torch.Generator(device=self.where)
        generator.manual_seed(seed)
        generator.set_offset(OFFSETS_PER_DRAW * num_draws)
        return generator

    def drop_graphs(self, runner: Any) -> None:
        """Drop the CUDA graphs: they have the addresses of the KV cache, and vLLM would replay instead of recapture
        them."""
        torch.cuda.synchronize()
        vllm_api.CUDAGraphWrapper.clear_all_graphs()
        vllm_api.BreakableCUDAGraphWrapper.clear_all_graphs()
        dispatcher = runner.cudagraph_dispatcher
        for keys in dispatcher.cudagraph_keys.values():
            keys.clear()
        dispatcher.keys_initialized = False

    def upload(self, *columns: NDArray[Any]) -> tuple[torch.Tensor, ...]:
        """Without waiting for the device, as the copies are from pinned memory."""
        return tuple(torch.from_numpy(column).pin_memory().to(self.where, non_blocking=True) for column in columns)

    def download(self, *tensors: torch.Tensor) -> HostCopy:
        return downloaded(tensors)

    def now(self) -> DeviceTime:
        return self._times.now(torch.cuda.current_stream())
