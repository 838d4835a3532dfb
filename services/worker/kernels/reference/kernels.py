"""The reference implementation."""

import torch

from services.worker.device.cpu import CpuDevice
from services.worker.device.interface import ComputeDevice
from services.worker.kernels.interface.drafting import DraftingKernels
from services.worker.kernels.interface.network import NetworkKernels
from services.worker.kernels.interface.rows import RowKernels
from services.worker.kernels.interface.sampling import SamplingKernels
from services.worker.kernels.interface.workspaces import EpochSizes, Uses
from services.worker.kernels.reference.drafting import ReferenceDrafting
from services.worker.kernels.reference.network import ReferenceNetwork
from services.worker.kernels.reference.rows import ReferenceRows
from services.worker.kernels.reference.sampling import ReferenceSampling


class ReferenceKernels:
    """`Kernels`"""

    def __init__(self, activations: torch.dtype) -> None:
        self.device: ComputeDevice = CpuDevice()
        self.network: NetworkKernels = ReferenceNetwork(activations)
        self.rows: RowKernels = ReferenceRows()
        self.sampling: SamplingKernels = ReferenceSampling()
        self.drafting: DraftingKernels = ReferenceDrafting()

    def float32_network(self) -> NetworkKernels:
        return ReferenceNetwork(torch.float32)

    def workspaces(self, sizes: EpochSizes) -> Uses:
        return {}

    def use_threads(self, number: int) -> None:
        torch.set_num_threads(number)
