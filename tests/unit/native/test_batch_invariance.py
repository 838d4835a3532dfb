"""A row's bits depend on nothing but the row: the ground that equal answers in float32 stand on."""

import pytest
import torch

from services.worker.backends.native.kernels import product as product_kernels
from services.worker.backends.native.kernels.rows import gate_kernel, norm_kernel
from services.worker.backends.native.kernels.team import set_num_threads
from services.worker.backends.native.linear import Linear

SIZES = [*range(1, 71), 96, 128, 257]


@pytest.mark.parametrize("shape", [(64, 96), (104, 64), (256, 512), (96, 211)], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_products_give_a_row_the_same_bits_at_every_batch_size(
    shape: tuple[int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_kernels, "WORTH", 1)  # small products are shared too
    torch.manual_seed(0)
    width, height = shape
    linear = Linear(torch.randn(height, width), torch.randn(height))
    x = torch.randn(max(SIZES), width)
    set_num_threads(threads)
    try:
        alone = torch.cat([linear(x[i : i + 1].contiguous()) for i in range(len(x))])
        for size in SIZES:
            assert torch.equal(linear(x[-size:].contiguous()), alone[-size:]), size
    finally:
        set_num_threads(1)


def test_products_are_right() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(96, 64), torch.randn(96), torch.randn(9, 64)
    torch.testing.assert_close(Linear(weight.clone(), bias)(x), x @ weight.T + bias, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("width", [5, 16, 64, 104, 1000])
@pytest.mark.parametrize("half", [False, True])
def test_norm(width: int, half: bool) -> None:
    torch.manual_seed(0)
    kind = torch.bfloat16 if half else torch.float32
    x, delta, weight = torch.randn(40, width), torch.randn(40, width).to(kind), torch.randn(width)
    expected = x + delta.float()
    residual, out = x.clone(), torch.empty(40, width, dtype=kind)
    kernel = norm_kernel(half)
    kernel.run(40, (residual.data_ptr(), delta.data_ptr(), weight.data_ptr(), out.data_ptr(), width, 1e-6))
    torch.testing.assert_close(residual, expected)
    normed = torch.nn.functional.rms_norm(expected, (width,), weight, 1e-6)
    torch.testing.assert_close(out.float(), normed, atol=0.04 if half else 1e-5, rtol=0)
    row, alone = x[7:8].clone(), torch.empty(1, width, dtype=kind)
    kernel.run(1, (row.data_ptr(), delta[7].data_ptr(), weight.data_ptr(), alone.data_ptr(), width, 1e-6))
    assert torch.equal(alone[0], out[7])


@pytest.mark.parametrize("width", [5, 16, 104])
@pytest.mark.parametrize("half", [False, True])
def test_gate(width: int, half: bool) -> None:
    torch.manual_seed(0)
    kind = torch.bfloat16 if half else torch.float32
    gate_up = (torch.randn(40, 2 * width) * 30).to(kind)
    gate_up[0, 0], gate_up[1, 1] = -200.0, 200.0  # beyond what exp can hold
    out = torch.empty(40, width, dtype=kind)
    gate_kernel(half).run(40, (gate_up.data_ptr(), out.data_ptr(), width))
    gate, up = gate_up.float().split(width, -1)
    torch.testing.assert_close(
        out.float(), torch.nn.functional.silu(gate) * up, atol=1e-3, rtol=0.01 if half else 1e-5
    )
