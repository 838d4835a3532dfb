"""The compiled implementation for processors."""

import torch

from services.worker.device.interface import ComputeDevice
from services.worker.kernels.cpu.drafting import CpuDrafting
from services.worker.kernels.cpu.network import CpuNetwork
from services.worker.kernels.cpu.rows import CpuRows
from services.worker.kernels.cpu.sampling import CpuSampling
from services.worker.kernels.cpu.thread_team import set_num_threads
from services.worker.kernels.interface.kernels import Kernels


class CpuKernels(Kernels):
    """`activations`: of the model's products; `own`, `wide`, `few_rows`: see `CpuNetwork`."""

    def __init__(
        self, activations: torch.dtype, own: str | None = None, wide: bool = False, few_rows: bool = False
    ) -> None:
        self._wide = wide
        self.device, self.network = ComputeDevice(), CpuNetwork(activations, own, wide, few_rows)
        self.rows, self.sampling, self.drafting = CpuRows(own), CpuSampling(), CpuDrafting()

    def float32_network(self) -> CpuNetwork:
        return CpuNetwork(torch.float32, wide=self._wide)

    def use_threads(self, number: int) -> None:
        """torch computes little, and its threads would spin on cores that other threads need. It gets none."""
        set_num_threads(number)
        torch.set_num_threads(1)
