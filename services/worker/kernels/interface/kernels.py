"""One implementation of all operations."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from services.worker.device.interface import ComputeDevice
from services.worker.kernels.interface.attention import AttentionShape
from services.worker.kernels.interface.drafting import DraftingKernels
from services.worker.kernels.interface.kv_cache import CacheShape
from services.worker.kernels.interface.network import NetworkKernels
from services.worker.kernels.interface.rows import RowKernels
from services.worker.kernels.interface.sampling import SamplingKernels

Uses = Mapping[str, int]
"""Bytes by use; the names are those of the log."""


class EpochSizes(NamedTuple):
    """The largest step of an epoch."""

    rows: Mapping[str, int]
    """Rows of the buffers of the forward pass, by kind."""
    num_slots: int
    max_model_len: int
    vocab_size: int
    num_drafts: int
    """Maximum number of drafts of a row; 0: no speculation."""
    attention: AttentionShape
    cache: CacheShape


class Kernels:
    """One implementation, for a model in one dtype. Each group is for one calling thread."""

    device: ComputeDevice
    """Device that computes; operands of the model are on it."""
    network: NetworkKernels
    """The network with the activations that the selection chose for the model's dtype."""
    rows: RowKernels
    sampling: SamplingKernels
    drafting: DraftingKernels

    def __init__(self, activations: torch.dtype) -> None:
        self.device, self.network = ComputeDevice(), NetworkKernels(activations)
        self.rows, self.sampling, self.drafting = RowKernels(), SamplingKernels(), DraftingKernels()

    def float32_network(self) -> NetworkKernels:
        """Return another network, with float32 activations over a cache in the model's dtype."""
        return NetworkKernels(torch.float32)

    def workspaces(self, sizes: EpochSizes) -> Uses:
        """Return the most memory of the device that the operations of a step take beside their operands; nothing where
        the memory is the host's."""
        return {}

    def use_threads(self, number: int) -> None:
        """Compute with `number` threads in this process, including the calling thread."""
        torch.set_num_threads(number)
