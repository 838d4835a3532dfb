"""Quantised weights: ggml's blocks, from GGUF files or rounded here."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch

from services.checkpoint.gguf.tensor_types import TENSOR_TYPES
from services.worker.kernels.layout import GROUP

Quantization = Literal["int8", "int4"]
_BLOCKS = {own.name: own for own in TENSOR_TYPES.values()}


@dataclass(frozen=True)
class BlockRows:
    """Outputs whose weights are blocks of one type."""

    kind: str
    """Type in ggml, such as "Q4_K"."""
    rows: torch.Tensor
    """uint8[out, bytes of a row]; may be mapped from a file, and must not be written"""

    @property
    def shape(self) -> tuple[int, int]:
        own = _BLOCKS[self.kind]
        return self.rows.shape[0], self.rows.shape[1] // own.block_bytes * own.block_elements

    def dequantized(self) -> torch.Tensor:
        """float32[out, in]"""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize  # takes 0.4 s, which products do not need

        if not len(self.rows):
            return torch.empty(self.shape)
        return torch.from_numpy(dequantize(self.rows.contiguous().numpy(), GGMLQuantizationType[self.kind]))


@dataclass(frozen=True)
class QuantizedWeight:
    """Weights in blocks. The types may differ from output to output."""

    parts: tuple[BlockRows, ...]
    """Consecutive outputs; neighbours of one type may be several parts."""

    @classmethod
    def from_rows(cls, kind: str, rows: torch.Tensor) -> "QuantizedWeight":
        return cls((BlockRows(kind, rows),))

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def kinds(self) -> list[str]:
        return [part.kind for part in self.parts]

    @property
    def nbytes(self) -> int:
        return sum(part.rows.nbytes for part in self.parts)

    def select(self, index: torch.Tensor) -> torch.Tensor:
        """float32[rows, in]: the weights of some outputs, int64[rows]."""
        found, first = torch.empty(len(index), self.shape[1]), 0
        for part in self.parts:
            here = (index >= first) & (index < first + part.shape[0])
            found[here] = BlockRows(part.kind, part.rows[index[here] - first]).dequantized()
            first += part.shape[0]
        return found

    def rows(self, index: torch.Tensor) -> "QuantizedWeight":
        """Return some outputs of a weight of one part, int64[rows]."""
        [part] = self.parts
        return self.from_rows(part.kind, part.rows[index])

    def dequantized(self) -> torch.Tensor:
        """float32[out, in]"""
        return torch.cat([part.dequantized() for part in self.parts])

    def padded(self, missing: int) -> "QuantizedWeight":
        """With `missing` more outputs whose weights are zero."""
        last = self.parts[-1]
        zeros = BlockRows(last.kind, torch.zeros(missing, last.rows.shape[1], dtype=torch.uint8))
        return QuantizedWeight((*self.parts, zeros)) if missing else self

    def by_type(self) -> list[tuple[str, list[torch.Tensor]]]:
        """Return neighbours of one type together, in order."""
        groups = groupby(self.parts, key=lambda part: part.kind)
        return [(kind, [part.rows for part in parts]) for kind, parts in groups]


Weight = torch.Tensor | QuantizedWeight
"""Weight of a product, [out, in]."""


def quantized(weight: torch.Tensor, kind: Quantization) -> QuantizedWeight:
    """Round to the nearest code of each group; [out, in], where `in` is a multiple of GROUP."""
    grouped = weight.float().unflatten(1, (-1, GROUP))
    if kind == "int8":
        scales = (grouped.abs().amax(2) / 127).half()
        codes = _codes(grouped, scales).clamp_(-127, 127).to(torch.int8).view(torch.uint8)
        return QuantizedWeight.from_rows("Q8_0", torch.cat((_bytes(scales), codes), 2).flatten(1))
    least, most = grouped.aminmax(dim=2)
    minima = least.half()
    scales = ((most - minima.float()) / 15).half()
    codes = _codes(grouped - minima.float()[..., None], scales).clamp_(0, 15).to(torch.uint8)
    halves = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
    rows = torch.cat((_bytes(scales), _bytes(minima), halves), 2)
    return QuantizedWeight.from_rows("Q4_1", rows.flatten(1))


def _codes(grouped: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    inverse = scales.float().reciprocal()
    return (grouped * inverse.masked_fill_(scales == 0, 0)[..., None]).round_()


def _bytes(halves: torch.Tensor) -> torch.Tensor:
    """uint8[rows, blocks, 2] from float16[rows, blocks]"""
    return halves[..., None].view(torch.uint8)


def stacked(weights: Sequence[Weight]) -> Weight:
    """One weight with the outputs of all. Beside quantised weights, others become int8."""
    plain = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if len(plain) == len(weights):
        return torch.cat(plain) if len(plain) > 1 else plain[0]
    all_coded = [w if isinstance(w, QuantizedWeight) else quantized(w, "int8") for w in weights]
    return QuantizedWeight(tuple(part for weight in all_coded for part in weight.parts))
