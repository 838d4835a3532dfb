"""Rounding to 8 and 4 bits, and weights of several formats."""

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from services.worker.kernels.quantized_weight import GROUP, Quantization, QuantizedWeight, quantized, stacked


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


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1"])
def test_some_outputs_of_several_formats(kind: str) -> None:
    torch.manual_seed(0)
    number = GGMLQuantizationType[kind]
    rows = quantize(torch.randn(9, 3 * GROUP).numpy(), number)
    coded, plain = QuantizedWeight.from_rows(kind, torch.from_numpy(rows)), torch.randn(4, 3 * GROUP)
    whole = stacked([coded, plain])
    assert isinstance(whole, QuantizedWeight)
    assert whole.kinds == [kind, "Q8_0"]
    expected = whole.dequantized()
    assert torch.equal(expected[:9], torch.from_numpy(dequantize(rows, number)))
    torch.testing.assert_close(expected[9:], plain, atol=0.02, rtol=0)
    index = torch.tensor([12, 4, 9, 0])
    assert torch.equal(whole.select(index), expected[index])
    assert torch.equal(whole.padded(2).dequantized(), torch.cat((expected, torch.zeros(2, 3 * GROUP))))


def test_plain_weights_are_stacked_as_they_are() -> None:
    first, second = torch.randn(3, GROUP), torch.randn(5, GROUP)
    assert torch.equal(stacked([first, second]), torch.cat((first, second)))
