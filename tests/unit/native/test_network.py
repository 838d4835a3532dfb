"""Operations of the forward pass of every implementation against torch, and the compiled ones against the reference."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker.kernels.interface.buffers import Buffers
from services.worker.kernels.interface.network import Activation, NetworkKernels
from services.worker.kernels.selection import OWN_BFLOAT16, processor_features
from tests.unit.native.implementations import BF16, F32, every_implementation, make

ROWS = [0, 1, 7, 40, 150]
each_dtype = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
WIDTHS = [1, 5, 16, 64, 104, 1000]


def network(implementation: str, dtype: torch.dtype = F32) -> NetworkKernels:
    return make(implementation, dtype).network


@every_implementation
@each_dtype
@pytest.mark.parametrize("shape", [(96, 64), (1, 5), (211, 104), (1030, 32)], ids=str)
def test_linear(implementation: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    if (implementation, dtype) == ("compiled", BF16) and not {*OWN_BFLOAT16} & processor_features():
        pytest.skip("this processor has no bfloat16 products")
    torch.manual_seed(0)
    for bias in (None, torch.randn(shape[0]).to(dtype)):
        weight = torch.randn(shape).to(dtype)
        linear = network(implementation, dtype).linear(weight.clone(), bias)
        for rows in ROWS:
            x = torch.randn(rows, shape[1]).to(dtype)
            result = linear(x, torch.empty(rows, shape[0], dtype=dtype))
            expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
            close = {"atol": 1e-4, "rtol": 1e-5} if dtype == F32 else {"atol": 0.1, "rtol": 0.02}
            torch.testing.assert_close(result.float(), expected, **close)
            exact = linear(x, torch.full((rows, shape[0]), torch.nan))
            torch.testing.assert_close(exact, expected, atol=1e-4, rtol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest result in float32."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if result.dtype == F32:
            self.most = max(self.most, result.numel())
        return result


def test_a_head_in_bfloat16_is_not_converted_as_a_whole_in_each_step() -> None:
    head = network("reference", BF16).linear(torch.ones(5000, 8, dtype=BF16))
    with LargestTensor() as largest:
        logits = head(torch.ones(2, 8, dtype=BF16), torch.empty(2, 5000))
    assert logits.unique().tolist() == [8.0]
    assert largest.most < 5000 * 8


@every_implementation
@each_dtype
@pytest.mark.parametrize("width", WIDTHS)
def test_norm(implementation: str, dtype: torch.dtype, width: int) -> None:
    """With and without a delta that is added first; each row by itself has the same bits."""
    torch.manual_seed(0)
    kernels, weight = network(implementation, dtype), torch.randn(width)
    for rows in ROWS:
        x = torch.randn(rows, width)
        for delta in (None, torch.randn(rows, width).to(dtype)):
            residual, out = x.clone(), torch.empty(rows, width, dtype=dtype)
            kernels.norm(residual, delta, weight, 1e-6, out)
            total = x if delta is None else x + delta.float()
            assert torch.equal(residual, total)
            normed = F.rms_norm(total, (width,), weight, 1e-6)
            torch.testing.assert_close(out.float(), normed, atol=0.04 if dtype == BF16 else 1e-5, rtol=1e-5)
            if rows > 3:
                row, alone = total[3:4].clone(), torch.empty(1, width, dtype=dtype)
                kernels.norm(row, None, weight, 1e-6, alone)
                assert torch.equal(alone[0], out[3])


@every_implementation
@each_dtype
@pytest.mark.parametrize("width", [5, 104])
def test_norm_of_an_output_and_a_residual_without_a_norm(implementation: str, dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    kernels, weight = network(implementation, dtype), torch.randn(width)
    for rows in ROWS:
        delta, residual = torch.randn(rows, width).to(dtype), torch.randn(rows, width)
        total, out = residual + 0.25 * delta.float(), torch.empty(rows, width, dtype=dtype)
        kernels.norm(None, delta, weight, 1e-6, out)
        normed = F.rms_norm(delta.float(), (width,), weight, 1e-6)
        torch.testing.assert_close(out.float(), normed, atol=0.04 if dtype == BF16 else 1e-5, rtol=1e-5)
        kernels.norm(residual, delta, None, 1e-6, out, 0.25)
        assert torch.equal(residual, total)
        assert torch.equal(out, total.to(dtype))


@every_implementation
@pytest.mark.parametrize(("normalised", "sigmoid"), [(True, False), (False, False), (False, True)])
def test_routing(implementation: str, normalised: bool, sigmoid: bool) -> None:
    """Rows of one expert lie together; equal logits choose the lowest number; a row alone has the same bits."""
    torch.manual_seed(0)
    routing, logits = network(implementation).routing, torch.randn(40, 6)
    logits[3] = 0.5
    routed = routing.route(logits, 2, normalised, sigmoid)
    chances = logits.sigmoid() if sigmoid else logits.softmax(1)
    best = chances.topk(2, 1)
    for expert, (start, end) in enumerate(zip(routed.ends, routed.ends[1:], strict=False)):
        tokens = routed.tokens[start:end]
        expected = [row for row in range(40) if expert in ([0, 1] if row == 3 else best.indices[row].tolist())]
        assert tokens.tolist() == expected
        weights = chances[tokens, expert] / (best.values[tokens].sum(1) if normalised else 1)
        torch.testing.assert_close(routed.weights[start:end], weights)
    results = torch.randn(80, 24)
    combined = routing.combine(results, routed.tokens, routed.weights, 40)
    own = [int(i) for i in (routed.tokens == 7).nonzero()]
    alone = routing.combine(results[own].contiguous(), torch.zeros(2, dtype=torch.int64), routed.weights[own], 1)
    assert torch.equal(combined[7], alone[0])
    expected_sum = (results[own] * routed.weights[own, None]).sum(0)
    torch.testing.assert_close(alone[0], expected_sum)


@every_implementation
@each_dtype
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_silu"])
@pytest.mark.parametrize("width", [1, 5, 16, 104])
def test_gate_and_multiply(implementation: str, dtype: torch.dtype, activation: Activation, width: int) -> None:
    torch.manual_seed(0)
    for rows in ROWS:
        gate_up = (torch.randn(rows, 2 * width) * 30).to(dtype)
        if rows > 1:
            gate_up[0, 0], gate_up[1, 0] = -200.0, 200.0  # beyond the range of exp
        out = torch.empty(rows, width, dtype=dtype)
        network(implementation, dtype).gate_and_multiply(gate_up, out, activation)
        gate, up = gate_up.float().split(width, -1)
        expected = F.silu(gate) * up
        if activation == "gelu_tanh":
            expected = F.gelu(gate, approximate="tanh") * up
        elif activation == "clamped_silu":
            gate = gate.clamp(max=7)
            expected = gate * (1.702 * gate).sigmoid() * (up.clamp(-7, 7) + 1)
        close = {"atol": 1e-3, "rtol": 0.01 if dtype == BF16 else 1e-5}
        torch.testing.assert_close(out.float(), expected, **close)


@every_implementation
@each_dtype
@pytest.mark.parametrize("width", [5, 16, 100])
def test_gather_copy_and_add(implementation: str, dtype: torch.dtype, width: int) -> None:
    """To the bit; into columns of a wider matrix too, whose other columns stay."""
    torch.manual_seed(0)
    kernels, source = network(implementation, dtype), torch.randn(30, width).to(dtype)
    for rows in ROWS:
        index = torch.randint(0, 30, (rows,), dtype=torch.int32)
        wide = torch.full((rows, width + 7), -5.0)
        kernels.gather(index, source, wide[:, 7:])
        assert torch.equal(wide[:, 7:], source[index.long()].float())
        kernels.copy(torch.arange(rows * 7.0).view(rows, 7), wide[:, :7])
        assert wide[:, :7].flatten().tolist() == list(range(rows * 7))
        total, delta = torch.randn(rows, width), torch.randn(rows, width).to(dtype)
        expected = total + delta.float()
        kernels.add(delta, total)
        assert torch.equal(total, expected)
        kernels.copy(delta, total)
        assert torch.equal(total, delta.float())
        kernels.copy(total, total, 2.5)
        assert torch.equal(total, delta.float() * 2.5)


@every_implementation
@pytest.mark.parametrize("vocab", [1, 7, 16, 211, 1024])
def test_most_likely(implementation: str, vocab: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, vocab) * 5
    logits[1] = 3.0  # all equal: the lowest id
    logits[2, -1] = 200.0
    ids, chances = torch.empty(9, dtype=torch.int32), torch.empty(9)
    sharpness = torch.tensor([1, 1, 0.5, 2.5, 1, 4, 0.1, 1, 2])
    network(implementation).most_likely(logits, sharpness, ids, chances)
    assert ids.tolist() == logits.argmax(1).tolist()
    assert ids[1] == 0
    torch.testing.assert_close(chances, (logits * sharpness[:, None]).softmax(1).amax(1), rtol=1e-5, atol=0)


# -- recording ---------------------------------------------------------------------------------------------------


class Squares(Buffers):
    def __init__(self, rows: int, picked: int) -> None:
        super().__init__(torch.device("cpu"), rows=rows, picked=picked)
        self.x, self.sum = self._rows("rows", 20), self._rows("rows", 20)
        self.normed = self._rows("rows", 20)
        self.index = self._rows("picked", dtype=torch.int32)
        self.out = self._rows("picked", 20)


def test_buffers_know_their_kinds_and_room() -> None:
    buffers = Squares(rows=8, picked=3)
    assert (buffers.kind_of(buffers.x), buffers.kind_of(buffers.out[:2])) == ("rows", "picked")
    with pytest.raises(KeyError):
        buffers.kind_of(torch.empty(8, 20))
    assert buffers.holds(rows=8, picked=2)
    assert not buffers.holds(rows=8, picked=4)
    some = buffers.first(rows=5)
    assert (len(some.x), len(some.index), len(buffers.x)) == (5, 3, 8)
    assert some.x.data_ptr() == buffers.x.data_ptr()


@every_implementation
@pytest.mark.parametrize("threads", [1, 2])
def test_a_recording_runs_over_as_many_rows_as_it_is_given(implementation: str, threads: int) -> None:
    """Rows behind them stay as they are; a function of the host is called in its place, each time."""
    kernels, calls = make(implementation), []
    net = kernels.network

    def host(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return x * 2

    def body(b: Squares) -> torch.Tensor:
        net.add(b.x, b.sum)
        doubled = net.call(host, b.sum, b.normed)
        net.gather(b.index, doubled, b.out)
        return b.out

    torch.manual_seed(0)
    kernels.use_threads(threads)
    try:
        buffers = Squares(rows=200, picked=6)
        recording = net.record(body, buffers)
        calls.clear()
        for rows, picked in ((200, 6), (1, 1), (150, 0), (3, 2)):
            buffers.x.copy_(torch.randn(200, 20))
            buffers.sum.copy_(before := torch.randn(200, 20))
            buffers.out.fill_(-1.0)
            buffers.index[:picked] = torch.arange(picked) % rows
            result = recording.run(rows=rows, picked=picked)
            expected = before.clone()
            expected[:rows] += buffers.x[:rows]
            assert torch.equal(buffers.sum, expected)
            assert torch.equal(result[:picked], 2 * expected[buffers.index[:picked].long()])
            assert (buffers.out[picked:] == -1).all()
        assert calls == [200, 1, 150, 3]
    finally:
        kernels.use_threads(1)


def test_what_is_no_buffer_cannot_be_recorded() -> None:
    net, x = network("compiled"), torch.zeros(3, 20)
    with pytest.raises(KeyError):
        net.record(lambda b: net.add(x, b.sum), Squares(rows=3, picked=1))
    net.add(torch.ones(3, 20), x)
    assert x.sum() == 60, "after the failure operations are run at once again"
