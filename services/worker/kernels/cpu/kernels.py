"""The compiled implementation for processors."""

import torch

from services.worker.device.cpu import CpuDevice
from services.worker.device.interface import ComputeDevice
from services.worker.kernels.cpu.drafting import CpuDrafting
from services.worker.kernels.cpu.network import CpuNetwork
from services.worker.kernels.cpu.rows import CpuRows
from services.worker.kernels.cpu.sampling import CpuSampling
from services.worker.kernels.cpu.thread_team import set_num_threads
from services.worker.kernels.interface.drafting import DraftingKernels
from services.worker.kernels.interface.network import NetworkKernels
from services.worker.kernels.interface.rows import RowKernels
from services.worker.kernels.interface.sampling import SamplingKernels
from services.worker.kernels.interface.workspaces import EpochSizes, Uses


class CpuKernels:
    """`Kernels`

    Args:
        activations: of the model's products
        dtype: the model's, in which keys and values are kept
        own, wide: see `CpuNetwork`
    """

    def __init__(
        self, activations: torch.dtype, dtype: torch.dtype, own: str | None = None, wide: bool = False
    ) -> None:
        self._dtype, self._wide = dtype, wide
        self._uses_torch = activations != torch.float32 and own is None
        self.device: ComputeDevice = CpuDevice()
        self.network: NetworkKernels = CpuNetwork(activations, dtype, own, wide)
        self.rows: RowKernels = CpuRows()
        self.sampling: SamplingKernels = CpuSampling()
        self.drafting: DraftingKernels = CpuDrafting()

    def float32_network(self) -> NetworkKernels:
        return CpuNetwork(torch.float32, self._dtype, wide=self._wide)

    def workspaces(self, sizes: EpochSizes) -> Uses:
        return {}

    def use_threads(self, number: int) -> None:
        """If the products are our own, torch computes little, and its threads would spin on cores that other threads
        need. It therefore gets no threads."""
        set_num_threads(number)
        torch.set_num_threads(number if self._uses_torch else 1)
