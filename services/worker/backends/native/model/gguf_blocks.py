"""Blocks of GGUF files that the kernels compute with as they are."""

import torch

from services.worker.backends.native.kernels.quantized_weight import QuantizedWeight
from services.worker.weights import QuantizedRows

KEPT = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
"""Types that are kept without loss, and the bytes of a block. Source of the layouts: ggml's `ggml-common.h`."""


def weight_from_blocks(blocks: QuantizedRows) -> QuantizedWeight | None:
    """Return the same values; None for other types, and for scales whose minima float16 cannot hold."""
    if blocks.kind not in KEPT:
        return None
    rows = blocks.rows.unflatten(1, (-1, KEPT[blocks.kind]))
    scales = _float16(rows[..., :2])
    if blocks.kind == "Q8_0":
        return QuantizedWeight("int8", rows[..., 2:].view(torch.int8).flatten(1), scales, None)
    minima = _float16(rows[..., 2:4]) if blocks.kind == "Q4_1" else scales * -8
    if not bool(minima.isfinite().all()):
        return None
    halves = rows[..., -16:]
    codes = torch.cat((halves & 15, halves >> 4), 2)
    return QuantizedWeight("int4", codes.flatten(1), scales, minima)


def _float16(pairs: torch.Tensor) -> torch.Tensor:
    """float16[rows, blocks] from uint8[rows, blocks, 2]"""
    return pairs.contiguous().view(torch.float16).squeeze(2)
