"""Codes of 8 and 4 bits: rounding, blocks of GGUF files, and stacks."""

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from services.worker.backends.native.kernels.quantized_weight import (
    GROUP,
    Quantization,
    QuantizedWeight,
    dequantized,
    quantized,
    stacked,
)
from services.worker.backends.native.model.gguf_blocks import weight_from_blocks
from services.worker.weights import QuantizedRows


def blocks(kind: str, weight: torch.Tensor) -> tuple[QuantizedRows, torch.Tensor]:
    """A weight in blocks, and what the `gguf` package makes of them."""
    number = GGMLQuantizationType[kind]
    rows = quantize(weight.numpy(), number)
    return QuantizedRows(kind, torch.from_numpy(rows)), torch.from_numpy(dequantize(rows, number))


@pytest.mark.parametrize(("kind", "levels"), [("int8", 254), ("int4", 15)])
def test_error_is_at_most_half_a_step(kind: Quantization, levels: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 4 * GROUP)
    weight[0, :GROUP] = 0
    weight[1, :GROUP] = 3
    grouped = weight.unflatten(1, (-1, GROUP))
    span = 2 * grouped.abs().amax(2) if kind == "int8" else grouped.amax(2) - grouped.amin(2)
    error = (quantized(weight, kind).dequantized() - weight).abs().unflatten(1, (-1, GROUP)).amax(2)
    assert bool((error <= span / levels * 0.51 + 2e-3 * grouped.abs().amax(2)).all())
    assert bool((error[0, 0] == 0).all())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_gguf_blocks_are_kept_without_loss(kind: str) -> None:
    torch.manual_seed(0)
    stored, expected = blocks(kind, torch.randn(9, 3 * GROUP) * 0.1)
    weight = weight_from_blocks(stored)
    assert weight is not None
    assert weight.kind == ("int8" if kind == "Q8_0" else "int4")
    assert torch.equal(weight.dequantized(), expected)
    assert torch.equal(weight.select(torch.tensor([4, 0])), expected[[4, 0]])


def test_other_blocks_are_not_kept() -> None:
    assert weight_from_blocks(blocks("Q5_1", torch.randn(2, GROUP))[0]) is None
    large = np.zeros((1, 18), np.uint8)
    large[0, :2] = np.array([60000.0], np.float16).view(np.uint8)
    # 8 * 60000 is no float16
    assert weight_from_blocks(QuantizedRows("Q4_0", torch.from_numpy(large))) is None


def test_stacked_weights_of_one_kind_stay_and_of_two_become_int8() -> None:
    torch.manual_seed(0)
    first, second = torch.randn(3, GROUP), torch.randn(5, GROUP)
    same = stacked([quantized(first, "int4"), quantized(second, "int4")])
    assert isinstance(same, QuantizedWeight)
    assert same.kind == "int4"
    assert torch.equal(same.dequantized()[3:], quantized(second, "int4").dequantized())
    mixed = stacked([quantized(first, "int4"), second])
    assert isinstance(mixed, QuantizedWeight)
    assert mixed.kind == "int8"
    torch.testing.assert_close(dequantized(mixed)[3:], second, atol=0.02, rtol=0)
    assert torch.equal(dequantized(stacked([first, second])), torch.cat((first, second)))
