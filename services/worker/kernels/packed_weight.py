"""Weights in the layout of compiled kernels, from which products are made without their source."""

from typing import NamedTuple

import torch

from services.worker.kernels.quantized_weight import Weight


class PackedRows(NamedTuple):
    """Consecutive outputs of a weight."""

    layout: str
    """Name that the kernels give the layout, such as a type in ggml. With the choice of kernels it says what the memory
    means."""
    outputs: int
    inputs: int
    memory: torch.Tensor
    """Must not be written."""


PackedWeight = tuple[PackedRows, ...]
"""All outputs of a weight, in order."""
Packed = PackedWeight | Weight
"""Result of packing. Kernels without a layout of their own leave the weight as it is."""
PLAIN = "these kernels have no layout of their own"
