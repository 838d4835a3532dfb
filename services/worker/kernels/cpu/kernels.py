"""The compiled implementation for processors."""

from dataclasses import replace

import torch

from services.worker.device.interface import ComputeDevice
from services.worker.kernels.cpu.drafting import CpuDrafting
from services.worker.kernels.cpu.network import CpuNetwork
from services.worker.kernels.cpu.rows import CpuRows
from services.worker.kernels.cpu.sampling import CpuSampling
from services.worker.kernels.cpu.thread_team import set_num_threads
from services.worker.kernels.interface.kernels import Kernels
from services.worker.kernels.selection import WIDE, KernelChoice


class CpuKernels(Kernels):
    def __init__(self, choice: KernelChoice) -> None:
        self._choice = choice
        self.device, self.network = ComputeDevice(), CpuNetwork(choice)
        self.rows, self.sampling, self.drafting = CpuRows(choice.own), CpuSampling(), CpuDrafting()

    def float32_network(self) -> CpuNetwork:
        needs = (WIDE,) if self._choice.wide else ()
        return CpuNetwork(replace(self._choice, activations=torch.float32, needs=needs, few_rows=False))

    def use_threads(self, number: int) -> None:
        """torch computes little, and its threads would spin on cores that other threads need. It gets none."""
        set_num_threads(number)
        torch.set_num_threads(1)
