"""One implementation of all operations."""

from typing import Protocol

from services.worker.backends.native.kernels.interface.drafting import DraftingKernels
from services.worker.backends.native.kernels.interface.network import NetworkKernels
from services.worker.backends.native.kernels.interface.rows import RowKernels
from services.worker.backends.native.kernels.interface.sampling import SamplingKernels


class Kernels(Protocol):
    """One implementation, for a model in one dtype. Each group is for one calling thread."""

    network: NetworkKernels
    """The network with the activations that the selection chose for the model's dtype."""
    rows: RowKernels
    sampling: SamplingKernels
    drafting: DraftingKernels

    def float32_network(self) -> NetworkKernels:
        """Return another network, with float32 activations over a cache in the model's dtype."""
        ...

    def use_threads(self, number: int) -> None:
        """Compute with `number` threads in this process, including the calling thread."""
        ...
