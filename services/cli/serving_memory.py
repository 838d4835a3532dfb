"""Memory that a native worker may use on this machine: that of the host, or that of a GPU. Without torch."""

from dataclasses import dataclass

from services.cli.settings import ConfigurationError
from services.config import ServeConfig
from services.release import installed
from services.units import size_text
from services.worker import gpus, machine

CPU_BUILD = "+cpu"
"""End of the version of torch's builds for CPUs."""


@dataclass(frozen=True)
class ServingMemory:
    """Memory for the weights and KV caches of all ranks."""

    free: int
    """Bytes."""
    words: str
    """Text after the number of free bytes."""
    is_gpu: bool

    def cache_budget(self, configured: int, weights: int) -> int:
        """Return the bytes of the KV cache of a rank: `configured`, or the default if it is 0."""
        if configured or not self.is_gpu:
            return machine.cache_budget(configured)
        return max(0, self.free - weights)


def serving_memory(config: ServeConfig) -> ServingMemory:
    """Return the memory of the device that `--device` names, or of the GPU that `auto` would use.

    Raises: ConfigurationError, if a GPU is wanted, but torch is a build for CPUs.
    """
    build = installed("torch")
    if config.device == "cuda" and build.endswith(CPU_BUILD):
        raise ConfigurationError(
            f"--device cuda: torch {build} is a build for CPUs; install a CUDA build of torch, or use --device cpu"
        )
    found = [] if config.device == "cpu" or build.endswith(CPU_BUILD) else gpus.gpus()
    if not found:
        return ServingMemory(machine.free_memory(), "of memory are free", False)
    gpu = found[0]
    limit = int(gpu.total * config.gpu_memory_utilization) - (gpu.total - gpu.free)
    words = f"of {gpu.name} ({size_text(gpu.total)}) may be used"
    return ServingMemory(max(0, limit), words, True)
