"""Weights in the layout of the kernels: one copy, from which products are computed and vectors are looked up."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from services.worker.backends.native.kernels.cpu.compiled.quantized import (
    BF16,
    GROUP,
    GROUP_BYTES,
    INT4,
    INT8,
    PANEL,
)
from services.worker.backends.native.kernels.quantized_weight import QuantizedWeight, Weight

KINDS = {"int8": INT8, "int4": INT4}


@dataclass(frozen=True)
class Panels:
    """The layout of `compiled.quantized`; outputs are padded to a multiple of `BLOCK`."""

    BLOCK = 4 * PANEL

    kind: int
    outputs: int
    inputs: int
    memory: torch.Tensor
    """uint8[panels, groups, bytes of a group]"""

    @classmethod
    def from_weight(cls, weight: Weight) -> "Panels":
        outputs, inputs = weight.shape
        if isinstance(weight, QuantizedWeight):
            kind = KINDS[weight.kind]
            memory = _coded(weight.padded(-outputs % cls.BLOCK))
        else:
            kind, missing = BF16, (0, -inputs % GROUP, 0, -outputs % cls.BLOCK)
            memory = _paired(functional.pad(weight.to(torch.bfloat16), missing))
        return cls(kind, outputs, inputs, memory)

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes


def _paired(weight: torch.Tensor) -> torch.Tensor:
    panels = weight.unflatten(1, (-1, GROUP // 2, 2)).unflatten(0, (-1, PANEL))
    return panels.permute(0, 2, 3, 1, 4).contiguous().view(torch.uint8).flatten(2).flatten(2)


def _coded(weight: QuantizedWeight) -> torch.Tensor:
    codes = weight.codes.unflatten(1, (-1, GROUP)).unflatten(0, (-1, PANEL))
    kind = KINDS[weight.kind]
    memory = torch.empty(codes.shape[0], codes.shape[2], GROUP_BYTES[kind], dtype=torch.uint8)
    numbers = [weight.scales] if weight.minima is None else [weight.scales, weight.minima]
    for number, values in enumerate(numbers):
        by_lane = values.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous().view(torch.uint8)
        memory[..., number * 2 * PANEL : (number + 1) * 2 * PANEL] = by_lane
    if kind == INT4:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    start = len(numbers) * 2 * PANEL
    memory[..., start:].unflatten(2, (-1, PANEL)).copy_(codes.permute(0, 2, 3, 1).view(torch.uint8))
    return memory
