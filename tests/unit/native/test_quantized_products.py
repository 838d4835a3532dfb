"""Products and embeddings with int8 and int4 weights, against the reference on the same codes."""

from collections.abc import Iterator

import pytest
import torch

from services.worker.backends.native.kernels.interface.network import NetworkKernels
from services.worker.backends.native.kernels.quantized_weight import Quantization, quantized
from services.worker.backends.native.kernels.selection import choose, create, processor_features
from tests.unit.native.implementations import BF16, F32, make

ROWS = [1, 2, 3, 5, 6, 16, 17, 31, 40, 150]
SHAPES = [(96, 64), (1, 32), (211, 96), (130, 576)]
each_kind = pytest.mark.parametrize("kind", ["int8", "int4"])
each_dtype = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)


def compiled(dtype: torch.dtype) -> NetworkKernels:
    """The network that this processor computes quantised weights with."""
    return create(choose("compiled", "cpu", dtype, processor_features(), quantized=True)).network


def reference(activations: torch.dtype) -> NetworkKernels:
    return make("reference", activations).network


def cases() -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Weights and biases."""
    torch.manual_seed(0)
    for number, (outputs, inputs) in enumerate(SHAPES):
        yield torch.randn(outputs, inputs), torch.randn(outputs) if number % 2 else None


@each_kind
@each_dtype
def test_products_equal_the_reference_and_a_row_has_the_same_bits_in_any_batch(
    kind: Quantization, dtype: torch.dtype
) -> None:
    network = compiled(dtype)
    for weight, bias in cases():
        coded = quantized(weight, kind)
        ours = network.linear(coded, bias)
        expects = reference(network.activations).linear(coded, bias)
        x = torch.randn(max(ROWS), weight.shape[1]).to(network.activations)
        whole = ours(x, torch.empty(len(x), len(weight), dtype=x.dtype))
        # The reference rounds weights to bfloat16, and not every kernel does
        close = {"atol": 1e-3, "rtol": 1e-4} if x.dtype == F32 else {"atol": 0.2, "rtol": 0.02}
        torch.testing.assert_close(whole, expects(x, torch.empty_like(whole)), **close)
        for rows in ROWS:
            for first in {0, len(x) - rows}:
                some = x[first : first + rows].contiguous()
                out = torch.full((rows, len(weight)), torch.nan).to(x.dtype)
                assert torch.equal(ours(some, out), whole[first : first + rows])


@each_dtype
def test_plain_bfloat16_weights_give_a_row_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    network = create(choose("compiled", "cpu", dtype, processor_features(), invariant=True)).network
    torch.manual_seed(0)
    for outputs, inputs in [(96, 64), (1, 5), (211, 104), (1000, 31)]:
        weight, bias = torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs)
        ours = network.linear(weight.clone(), bias)
        x = torch.randn(1100, inputs).to(network.activations)
        whole = ours(x, torch.empty(len(x), outputs, dtype=x.dtype))
        close = {"atol": 1e-3, "rtol": 1e-4} if x.dtype == F32 else {"atol": 0.1, "rtol": 0.02}
        torch.testing.assert_close(whole.float(), x.float() @ weight.float().T + bias, **close)
        for rows in [*ROWS, 1025]:
            out = torch.empty(rows, outputs, dtype=x.dtype)
            assert torch.equal(ours(x[-rows:].clone(), out), whole[-rows:])


@each_kind
@each_dtype
def test_an_embedding_is_looked_up_to_the_bit_and_multiplied_from_the_same_memory(
    kind: Quantization, dtype: torch.dtype
) -> None:
    network = compiled(dtype)
    for weight, _ in cases():
        coded = quantized(weight, kind)
        embedding, expects = network.embedding(coded), reference(F32).embedding(coded)
        assert len(embedding) == len(weight)
        index = torch.randint(0, len(weight), (20,), dtype=torch.int32)
        out, expected = torch.empty(20, weight.shape[1]), torch.empty(20, weight.shape[1])
        embedding.look_up(index, out)
        expects.look_up(index, expected)
        assert torch.equal(out, expected)
        x = torch.randn(4, weight.shape[1]).to(network.activations)
        tied, alone = network.tied(embedding), network.linear(coded)
        assert tied.num_bytes == embedding.num_bytes  # the same memory, counted once by the model
        logits = tied(x, torch.empty(4, len(weight), dtype=x.dtype))
        assert torch.equal(logits, alone(x, torch.empty_like(logits)))


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8.5), ("int4", 5)])
def test_weights_take_as_many_bits_as_they_should(kind: Quantization, bits: float) -> None:
    assert compiled(F32).linear(quantized(torch.randn(640, 320), kind)).num_bytes == 640 * 320 * bits / 8
