"""Operations of the forward pass under Triton's interpreter against the reference."""

import pytest
import torch

from services.worker.kernels.interface.network import NetworkKernels
from services.worker.kernels.quantized_weight import quantized
from services.worker.runner import LoadError
from tests.unit.native.cuda.kernel_cases import Accuracy, KernelMaker, each_dtype

ROWS = [0, 1, 5]


@each_dtype
@pytest.mark.parametrize("width", [1, 5, 64, 1500])
def test_norm(make: KernelMaker, accuracy: Accuracy, dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    ours, theirs, weight = make(dtype).network, NetworkKernels(dtype), torch.randn(width)
    for rows in ROWS:
        x = torch.randn(rows, width)
        for delta in (None, torch.randn(rows, width).to(dtype)):
            results = []
            for network in (ours, theirs):
                residual, out = x.clone(), torch.empty(rows, width, dtype=dtype)
                network.norm(residual, delta, weight, 1e-6, out)
                results.append((residual, out))
            assert torch.equal(results[0][0], results[1][0])
            torch.testing.assert_close(results[0][1], results[1][1], **accuracy.network[dtype])
        delta = torch.randn(rows, width).to(dtype)
        for residual, own in ((None, weight), (x, None)):
            results = []
            for network in (ours, theirs):
                stream, out = None if residual is None else x.clone(), torch.empty(rows, width, dtype=dtype)
                network.norm(stream, delta, own, 1e-6, out, 0.25)
                results.append(out)
            torch.testing.assert_close(*results, **accuracy.network[dtype])


@each_dtype
@pytest.mark.parametrize(
    ("width", "activation"), [(1, "silu"), (5, "silu"), (1500, "silu"), (5, "gelu_tanh"), (5, "clamped_silu")]
)
def test_gate_and_multiply(
    make: KernelMaker, accuracy: Accuracy, dtype: torch.dtype, width: int, activation: str
) -> None:
    torch.manual_seed(0)
    for rows in ROWS:
        gate_up = (torch.randn(rows, 2 * width) * 30).to(dtype)
        if rows > 1:
            gate_up[0, 0], gate_up[1, 0] = -200.0, 200.0  # beyond the range of exp
        ours, theirs = torch.empty(rows, width, dtype=dtype), torch.empty(rows, width, dtype=dtype)
        make(dtype).network.gate_and_multiply(gate_up, ours, activation)
        NetworkKernels(dtype).gate_and_multiply(gate_up, theirs, activation)
        torch.testing.assert_close(ours, theirs, **accuracy.network[dtype])


@each_dtype
@pytest.mark.parametrize("width", [5, 1100])
def test_gather_copy_and_add(make: KernelMaker, dtype: torch.dtype, width: int) -> None:
    """To the bit; into columns of a wider matrix too, whose other columns stay."""
    torch.manual_seed(0)
    network, source = make(dtype).network, torch.randn(30, width).to(dtype)
    for rows in ROWS:
        index = torch.randint(0, 30, (rows,), dtype=torch.int32)
        wide = torch.full((rows, width + 7), -5.0)
        network.gather(index, source, wide[:, 7:])
        assert torch.equal(wide[:, 7:], source[index.long()].float())
        assert (wide[:, :7] == -5).all()
        network.copy(torch.ones(rows, 7), wide[:, :7])
        assert (wide[:, :7] == 1).all()
        total, delta = torch.randn(rows, width), torch.randn(rows, width).to(dtype)
        expected = total + delta.float()
        network.add(delta, total)
        assert torch.equal(total, expected)


def test_gather_clamps_what_is_no_row(make: KernelMaker) -> None:
    """The input of a token that is missing."""
    out, source = torch.empty(3, 8), torch.randn(4, 8)
    make().network.gather(torch.tensor([-7, 2, 99], dtype=torch.int32), source, out)
    assert torch.equal(out, source[[0, 2, 3]])


@each_dtype
def test_linear_and_tied_head(make: KernelMaker, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, theirs = make(dtype).network, NetworkKernels(dtype)
    weight, bias = torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype)
    embedding = ours.embedding(weight.clone())
    tied = ours.tied(embedding)
    assert tied.num_bytes == embedding.num_bytes == weight.nbytes
    for rows in ROWS:
        x = torch.randn(rows, 64).to(dtype)
        for mine, wanted in ((None, tied), (bias, ours.linear(weight.clone(), bias.clone()))):
            expected = theirs.linear(weight, mine)(x, torch.empty(rows, 96, dtype=dtype))
            out = torch.empty(rows, 96, dtype=dtype)
            result = wanted(x, out)
            assert result.data_ptr() == out.data_ptr()
            torch.testing.assert_close(result, expected, atol=1e-4 if dtype == torch.float32 else 0.1, rtol=1e-3)
            assert torch.equal(wanted(x, torch.empty(rows, 96)), result.float())


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_weights_are_refused_by_name(make: KernelMaker, kind: str) -> None:
    network, weight = make().network, quantized(torch.randn(8, 64), kind)
    for prepare in (network.linear, network.embedding):
        with pytest.raises(LoadError, match=r"quantised weights \(Q\w+\) are not supported on CUDA"):
            prepare(weight)
