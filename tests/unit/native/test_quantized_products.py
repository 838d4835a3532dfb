"""Products and embeddings with quantised weights of every format, against the reference on the same blocks."""

from collections.abc import Iterator

import pytest
import torch

from services.worker.backends.native.memory import BITS
from services.worker.kernels.cpu.compiled.block_formats import FORMATS
from services.worker.kernels.interface.network import NetworkKernels
from services.worker.kernels.quantized_weight import QuantizedWeight, stacked
from services.worker.kernels.selection import TILES, choose, create, processor_features
from tests.integration.native.gguf_models import random_blocks
from tests.unit.native.implementations import BF16, F32, make

ROWS = [0, 1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 195, 201]
"""The last two are more rows than an item has, so that its second part has few of them, or smaller tiles."""
SHAPES = [(96, 64), (1, 32), (211, 96), (130, 576)]
CASES = [*((kind, F32) for kind in FORMATS), ("Q4_1", BF16), ("Q6_K", BF16)]
each_case = pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)


def compiled(dtype: torch.dtype) -> NetworkKernels:
    """The network that this processor computes quantised weights with."""
    return create(choose("compiled", "cpu", dtype, processor_features(), quantized=True)).network


def for_few_rows() -> NetworkKernels:
    """The network of the default mode, which differs from `compiled` with AMX."""
    return create(choose("compiled", "cpu", BF16, processor_features(), True, few_rows=True)).network


def reference(activations: torch.dtype) -> NetworkKernels:
    return make("reference", activations).network


def cases(kind: str) -> Iterator[tuple[QuantizedWeight, torch.Tensor | None]]:
    """Weights and biases."""
    torch.manual_seed(0)
    block = FORMATS[kind].inputs
    for number, (outputs, inputs) in enumerate(SHAPES):
        rows = random_blocks(kind, (outputs, -(-inputs // block) * block), size=0.4)
        bias = torch.randn(outputs) if number % 2 else None
        yield QuantizedWeight.from_rows(kind, torch.from_numpy(rows)), bias


def assert_equals_the_reference(network: NetworkKernels, coded: QuantizedWeight, bias: torch.Tensor | None) -> None:
    outputs, inputs = coded.shape
    ours = network.linear(coded, bias)
    expects = reference(network.activations).linear(coded, bias)
    x = torch.randn(max(ROWS), inputs).to(network.activations)
    whole = ours(x, torch.empty(len(x), outputs, dtype=x.dtype))
    assert torch.equal(ours(x, torch.empty(len(x), outputs)).to(x.dtype), whole)
    # The reference rounds weights to bfloat16 if activations are, and our product rounds activations to 13 to 16 bits
    expected = expects(x, torch.empty_like(whole)).float()
    assert (whole - expected).abs().max() < (2e-3 if x.dtype == F32 else 0.05) * expected.std()
    for rows in ROWS:
        for first in {0, len(x) - rows}:
            some = x[first : first + rows].contiguous()
            out = torch.full((rows, outputs), torch.nan).to(x.dtype)
            assert torch.equal(ours(some, out), whole[first : first + rows])


@each_case
def test_products_equal_the_reference_and_a_row_has_the_same_bits_in_any_batch(kind: str, dtype: torch.dtype) -> None:
    for coded, bias in cases(kind):
        assert_equals_the_reference(compiled(dtype), coded, bias)


def test_a_row_with_an_infinite_or_undefined_activation_has_no_number_and_changes_no_other() -> None:
    [coded, *_] = (weight for weight, _ in cases("Q4_K"))
    ours = compiled(F32).linear(coded)
    for rows in (3, 8):
        x = torch.randn(rows, coded.shape[1])
        expected = ours(x, torch.empty(rows, coded.shape[0]))
        x[0, 7], x[2, -1] = torch.nan, torch.inf
        found = ours(x, torch.empty_like(expected))
        assert not found[[0, 2]].isfinite().any()
        assert torch.equal(found[1], expected[1])
        assert torch.equal(found[3:], expected[3:])


@pytest.mark.parametrize(("kind", "byte"), [("Q4_K", 255), ("Q5_K", 255), ("Q6_K", 0), ("IQ4_XS", 0), ("Q8_0", 128)])
def test_sums_of_the_largest_numbers_and_activations_do_not_overflow(kind: str, byte: int) -> None:
    own = FORMATS[kind]
    rows = torch.full((16, own.source_bytes), byte, dtype=torch.uint8)
    if kind == "Q6_K":
        rows[:, 192:208] = 128
    for first in own.halves:
        rows[:, first : first + 2] = torch.ones(1, dtype=torch.float16).view(torch.uint8)
    coded = QuantizedWeight.from_rows(kind, rows)
    for network in (compiled(F32), for_few_rows()):
        for count in (1, 4, 9):
            x = torch.ones(count, own.inputs, dtype=network.activations)
            found = network.linear(coded)(x, torch.empty(count, 16))
            torch.testing.assert_close(found, coded.dequantized().sum(1).expand(count, -1))


def test_a_stack_of_several_formats_keeps_each_of_them() -> None:
    [one, two, three] = [next(cases(kind))[0] for kind in ("Q4_K", "Q4_K", "Q6_K")]
    coded = stacked([one, two, three])
    assert isinstance(coded, QuantizedWeight)
    network = compiled(F32)
    assert_equals_the_reference(network, coded, torch.randn(coded.shape[0]))
    apart = sum(network.linear(each).num_bytes for each in (stacked([one, two]), three))
    assert network.linear(coded).num_bytes == apart


@pytest.mark.skipif(TILES not in processor_features(), reason="other processors have one kind of products")
@pytest.mark.parametrize("kind", FORMATS)
def test_with_amx_there_are_products_for_few_rows(kind: str) -> None:
    for coded, bias in cases(kind):
        assert_equals_the_reference(for_few_rows(), coded, bias)


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
            assert torch.equal(ours(x[:rows].clone(), out), whole[:rows])


@pytest.mark.parametrize("kind", FORMATS)
def test_an_embedding_is_looked_up_to_the_bit(kind: str) -> None:
    for coded, _ in cases(kind):
        outputs, inputs = coded.shape
        embedding, expects = compiled(F32).embedding(coded), reference(F32).embedding(coded)
        index = torch.randint(0, outputs, (20,), dtype=torch.int32)
        out, expected = torch.empty(20, inputs), torch.empty(20, inputs)
        embedding.look_up(index, out)
        expects.look_up(index, expected)
        assert torch.equal(out, expected)


@each_case
def test_an_embedding_is_multiplied_from_the_same_memory(kind: str, dtype: torch.dtype) -> None:
    network = compiled(dtype)
    for coded, _ in cases(kind):
        outputs, inputs = coded.shape
        embedding = network.embedding(coded)
        x = torch.randn(4, inputs).to(network.activations)
        tied, alone = network.tied(embedding), network.linear(coded)
        assert tied.num_bytes == embedding.num_bytes  # the same memory, counted once by the model
        logits = tied(x, torch.empty(4, outputs, dtype=x.dtype))
        assert torch.equal(logits, alone(x, torch.empty_like(logits)))


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_take_as_many_bits_as_the_plan_says(kind: str) -> None:
    rows = random_blocks(kind, (640, 512), size=0.4)
    embedding = compiled(F32).embedding(QuantizedWeight.from_rows(kind, torch.from_numpy(rows)))
    assert embedding.num_bytes == 640 * 512 * BITS[kind] / 8
