"""Weights of 8 or 4 bits: codes of groups of 32 inputs, with a scale and a minimum for each group."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from services.worker.backends.native.layout import GROUP

Quantization = Literal["int8", "int4"]


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight is code * scale + minimum, computed in float32 and rounded once."""

    kind: Quantization
    codes: torch.Tensor
    """[out, in]: int8, or uint8 from 0 to 15"""
    scales: torch.Tensor
    """float16[out, in / GROUP]"""
    minima: torch.Tensor | None
    """float16[out, in / GROUP]; None for int8, whose groups have no minimum"""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        minima = 0 if self.minima is None else self.minima.nbytes
        return self.codes.nbytes + self.scales.nbytes + minima

    def select(self, index: torch.Tensor) -> torch.Tensor:
        """float32[rows, in]: the weights of some outputs, int64[rows]."""
        return self.rows(index).dequantized()

    def rows(self, index: torch.Tensor) -> "QuantizedWeight":
        """Return the weights of some outputs, int64[rows]."""
        minima = None if self.minima is None else self.minima[index]
        return QuantizedWeight(self.kind, self.codes[index], self.scales[index], minima)

    def dequantized(self) -> torch.Tensor:
        """float32[out, in]"""
        grouped = self.codes.float().unflatten(1, (-1, GROUP)) * self.scales.float()[..., None]
        if self.minima is not None:
            grouped += self.minima.float()[..., None]
        return grouped.flatten(1)

    def padded(self, missing: int) -> "QuantizedWeight":
        """With `missing` more outputs whose weights are zero."""

        def more(tensor: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(tensor, (0, 0, 0, missing)) if missing else tensor

        minima = None if self.minima is None else more(self.minima)
        return QuantizedWeight(self.kind, more(self.codes), more(self.scales), minima)


Weight = torch.Tensor | QuantizedWeight
"""Weight of a product, [out, in]."""


def quantized(weight: torch.Tensor, kind: Quantization) -> QuantizedWeight:
    """Round to the nearest code of each group; [out, in], where `in` is a multiple of GROUP."""
    grouped = weight.float().unflatten(1, (-1, GROUP))
    if kind == "int8":
        scales = (grouped.abs().amax(2) / 127).half()
        codes = _codes(grouped, scales).clamp_(-127, 127).to(torch.int8)
        return QuantizedWeight("int8", codes.flatten(1), scales, None)
    least, most = grouped.aminmax(dim=2)
    minima = least.half()
    scales = ((most - minima.float()) / 15).half()
    codes = _codes(grouped - minima.float()[..., None], scales).clamp_(0, 15).to(torch.uint8)
    return QuantizedWeight("int4", codes.flatten(1), scales, minima)


def _codes(grouped: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    inverse = scales.float().reciprocal()
    return (grouped * inverse.masked_fill_(scales == 0, 0)[..., None]).round_()


def stacked(weights: Sequence[Weight]) -> Weight:
    """One weight with the outputs of all. Weights of different kinds become int8, the nearest that holds them."""
    plain = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if len(plain) == len(weights):
        return torch.cat(plain) if len(plain) > 1 else plain[0]
    kinds = {weight.kind if isinstance(weight, QuantizedWeight) else "" for weight in weights}
    if len(kinds) > 1:
        return quantized(torch.cat([dequantized(weight) for weight in weights]), "int8")
    parts = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    minima = [part.minima for part in parts if part.minima is not None]
    codes, scales = torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts])
    return QuantizedWeight(parts[0].kind, codes, scales, torch.cat(minima) if minima else None)


def dequantized(weight: Weight) -> torch.Tensor:
    return weight.dequantized() if isinstance(weight, QuantizedWeight) else weight.float()
