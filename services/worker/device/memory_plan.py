"""Uses of a device's memory, and the share that the KV cache gets."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.units import size_text
from services.worker.device.interface import DeviceMemory
from services.worker.runner import LoadError

WORKSPACE = 512 << 20
"""Bytes for libraries, and for memory that torch's allocator divides badly."""


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one device, bytes, when the weights are loaded.

    Args:
        utilization: share of the memory that this rank may use (`--gpu-memory-utilization`), whatever others use.
        weights: of the model and of a drafter.
        uses: of memory that an epoch allocates later, beside the KV cache.
        configured: `--kv-cache-memory-bytes`; 0: what remains.
    """

    memory: DeviceMemory
    utilization: float
    weights: int
    uses: Mapping[str, int]
    configured: int = 0

    @property
    def buffers(self) -> int:
        return sum(self.uses.values())

    @property
    def cache(self) -> int:
        """Bytes for the KV cache.

        Raises: LoadError, if nothing remains.
        """
        if self.configured:
            return self.configured
        needed = self.weights + self.buffers + WORKSPACE
        limit = int(self.memory.total * self.utilization) - needed
        free = self.memory.free - self.buffers - WORKSPACE
        if limit <= 0:
            share = f"raise --gpu-memory-utilization above {needed / self.memory.total:.2f}, "
            raise LoadError(f"{self._nothing_remains}: {share}lower --max-num-batched-tokens, or use a smaller model")
        if free <= 0:
            raise LoadError(f"{self._nothing_remains}: end other processes that use the GPU, or use a smaller model")
        return min(limit, free)

    @property
    def _nothing_remains(self) -> str:
        return f"{self.describe()}: nothing remains for the KV cache"

    def describe(self) -> str:
        """Return the account as one line for the log."""
        others = max(0, self.memory.total - self.memory.free - self.weights)
        uses = ", ".join(f"{name} {size_text(size)}" for name, size in self.uses.items() if size)
        return (
            f"memory of the GPU: {size_text(self.memory.total)}, of which {self.utilization:.0%} may be used; weights "
            f"{size_text(self.weights)}, others {size_text(others)}, buffers {size_text(self.buffers)} "
            f"({uses}), workspaces {size_text(WORKSPACE)}"
        )
