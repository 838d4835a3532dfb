"""Float32 products by our own kernels: the right sums, and a row's bits depend neither on its batch nor on the kernel.

The kernel for AVX-512 computes on every processor, so all of them test it."""

import pytest
import torch

from services.worker.kernels.cpu.compiled import product as kernels
from services.worker.kernels.cpu.compiled.quantized import float32_rows_kernel
from services.worker.kernels.cpu.launching import Launcher
from services.worker.kernels.cpu.panels import PanelEmbedding
from services.worker.kernels.cpu.products import PanelProduct, float32_panels
from services.worker.kernels.cpu.thread_team import set_num_threads
from services.worker.kernels.selection import WIDE, choose

SHAPES = [(64, 96), (1, 5), (211, 64), (130, 17), (192, 384)]
SIZES = [*range(1, 20), 47, 48, 49, 70, 96, 97, 128, 257]
each_way = pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])


def product_of(weight: torch.Tensor, bias: torch.Tensor | None, wide: bool) -> PanelProduct:
    choice = choose("compiled", "cpu", torch.float32, [WIDE] * wide)
    return PanelProduct(Launcher(), float32_panels(weight, wide), bias, choice)


def multiply(product: PanelProduct, x: torch.Tensor, outputs: int) -> torch.Tensor:
    return product(x, torch.full((len(x), outputs), float("nan")))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("digits", ["bfloat16", "float32"])
@each_way
def test_equals_torch(wide: bool, shape: tuple[int, int], bias: bool, digits: str) -> None:
    """With weights that are kept in bfloat16, because they have no more digits, and with others."""
    torch.manual_seed(0)
    weight = torch.randn(shape).to(getattr(torch, digits)).float()
    added = torch.randn(shape[0]) if bias else None
    product = product_of(weight.clone(), added, wide)
    for rows in (0, 1, 2, 3, 4, 5, 8, 23, 49):
        x = torch.randn(rows, shape[1])
        expected = torch.nn.functional.linear(x, weight, added)
        torch.testing.assert_close(multiply(product, x, shape[0]), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("digits", ["bfloat16", "float32"])
@each_way
def test_vectors_of_an_embedding_are_looked_up_in_the_weights_of_a_product(
    wide: bool, shape: tuple[int, int], digits: str
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).to(getattr(torch, digits)).float()
    panels = float32_panels(weight.clone(), wide)
    embedding = PanelEmbedding(Launcher(), panels, float32_rows_kernel(wide, panels.memory.dtype == torch.bfloat16))
    index, out = torch.randint(0, shape[0], (300,), dtype=torch.int32), torch.full((300, shape[1] + 1), 7.0)
    embedding.look_up(index, out[:, :-1])
    assert torch.equal(out[:, :-1], weight[index])
    assert (out[:, -1] == 7).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@each_way
def test_a_row_has_the_same_bits_at_every_batch_size(
    wide: bool, shape: tuple[int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch invariance (docs/invariants.md), also where other threads compute parts."""
    monkeypatch.setattr(kernels, "WORTH", 1)  # small products are shared too
    torch.manual_seed(0)
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    product = product_of(weight, bias, wide)
    x = torch.randn(max(SIZES), shape[1])
    set_num_threads(threads)
    try:
        alone = torch.cat([multiply(product, x[i : i + 1].contiguous(), shape[0]) for i in range(len(x))])
        for size in SIZES:
            assert torch.equal(multiply(product, x[-size:].contiguous(), shape[0]), alone[-size:]), size
    finally:
        set_num_threads(1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("digits", ["bfloat16", "float32"])
def test_both_kernels_give_the_same_bits(shape: tuple[int, int], digits: str) -> None:
    """So the ranks of a group may have different processors."""
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).to(getattr(torch, digits)).float(), torch.randn(shape[0])
    narrow, wide = (product_of(weight.clone(), bias, is_wide) for is_wide in (False, True))
    for rows in (1, 3, 16, 97):
        x = torch.randn(rows, shape[1])
        assert torch.equal(multiply(narrow, x, shape[0]), multiply(wide, x, shape[0]))
