"""Products of few rows: right, and a row's bits are its own."""

import pytest
import torch

from services.worker.backends.native.kernels import product as product_kernels
from services.worker.backends.native.kernels.team import set_num_threads
from services.worker.backends.native.product import Product

SHAPES = [(64, 96), (1, 5), (211, 64), (130, 17), (192, 384)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("digits", ["bfloat16", "float32"])
def test_product(shape: tuple[int, int], bias: bool, digits: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).to(getattr(torch, digits)).float()
    added = torch.randn(shape[0]) if bias else None
    product = Product(weight.clone(), added)
    for rows in (1, 2, 3, 4, 5, 8, 23):
        x = torch.randn(rows, shape[1])
        expected = torch.nn.functional.linear(x, weight, added)
        torch.testing.assert_close(product(x), expected, atol=1e-4, rtol=1e-5)


def test_nothing_in_nothing_out() -> None:
    assert Product(torch.randn(70, 32))(torch.empty(0, 32)).shape == (0, 70)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_among_any_others(
    shape: tuple[int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_kernels, "WORTH", 1)  # small products are shared too
    torch.manual_seed(0)
    product, x = Product(torch.randn(shape)), torch.randn(19, shape[1])
    set_num_threads(threads)
    try:
        alone = torch.cat([product(x[i : i + 1].contiguous()) for i in range(len(x))])
        for size in range(1, len(x) + 1):
            assert torch.equal(product(x[-size:].contiguous()), alone[-size:]), size
    finally:
        set_num_threads(1)
