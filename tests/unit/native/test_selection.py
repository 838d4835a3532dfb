"""Kernels are chosen from one table: by what the user wants, device, dtype and processor."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from services.config import WorkerConfig
from services.worker.kernels.interface import row_loops
from services.worker.kernels.selection import PAIRS, TABLE, TILES, WIDE, choose, create, processor_features
from services.worker.runner import LoadError
from tests.unit.native.implementations import BF16, F32, make


@pytest.mark.parametrize(
    ("wanted", "dtype", "features", "implementation", "activations"),
    [
        ("auto", F32, (), "compiled", F32),
        ("auto", F32, (WIDE, PAIRS, TILES), "compiled", F32),
        ("auto", BF16, (PAIRS,), "compiled", BF16),
        ("auto", BF16, ("avx2",), "compiled", F32),
        ("compiled", BF16, (), "compiled", F32),
        ("reference", F32, (TILES,), "reference", F32),
        ("reference", BF16, (), "reference", BF16),
    ],
)
def test_first_row_that_fits(
    wanted: str, dtype: torch.dtype, features: tuple[str, ...], implementation: str, activations: torch.dtype
) -> None:
    choice = choose(wanted, "cpu", dtype, features)
    assert (choice.implementation, choice.activations) == (implementation, activations)
    assert create(choice).network.activations == activations


@pytest.mark.parametrize(
    ("dtype", "features", "quantized", "invariant", "products"),
    [
        (BF16, (PAIRS, TILES, WIDE), False, False, "our own, AMX, bfloat16"),
        (BF16, (PAIRS, TILES, WIDE), True, True, "our own, AMX, bfloat16"),
        (BF16, (PAIRS, WIDE), False, False, "our own, AVX-512, bfloat16"),
        (BF16, (PAIRS, WIDE), True, True, "our own, AVX-512, bfloat16"),
        (BF16, (WIDE,), False, False, "our own, AVX-512, float32 from bfloat16 weights"),
        (BF16, (WIDE,), True, True, "our own, AVX-512, float32 from bfloat16 weights"),
        (BF16, (), True, True, "our own, float32 from bfloat16 weights"),
        (F32, (), True, True, "our own, float32"),
        (F32, (PAIRS, WIDE), True, True, "our own, AVX-512, float32"),
    ],
)
def test_products_of_quantised_weights_and_of_batch_invariance(
    dtype: torch.dtype, features: tuple[str, ...], quantized: bool, invariant: bool, products: str
) -> None:
    assert choose("auto", "cpu", dtype, features, quantized, invariant).products == products


@pytest.mark.parametrize(
    ("features", "quantized", "changes"),
    [((PAIRS, TILES, WIDE), True, True), ((PAIRS, TILES, WIDE), False, False), ((PAIRS, WIDE), True, False)],
)
def test_few_rows_change_products_of_amx_with_quantised_weights(
    features: tuple[str, ...], quantized: bool, changes: bool
) -> None:
    plain, few = (choose("auto", "cpu", BF16, features, quantized, few_rows=some) for some in (False, True))
    assert (few == replace(plain, few_rows=True)) == changes == (few != plain)
    assert ("quantised weights as whole numbers" in few.describe(features)) == changes
    assert (create(few).network.arithmetic != create(plain).network.arithmetic) == changes


def test_the_reference_does_not_promise_batch_invariance() -> None:
    assert choose("reference", "cpu", BF16, (), quantized=True).implementation == "reference"
    with pytest.raises(LoadError, match="independently of the batch"):
        choose("reference", "cpu", BF16, (), invariant=True)


def test_a_device_without_kernels_is_refused() -> None:
    with pytest.raises(LoadError, match=r"no kernels \(auto\) compute torch.float32 on 'tpu'"):
        choose("auto", "tpu", F32, ())


def test_the_choice_is_described_in_one_line() -> None:
    line = choose("auto", "cpu", BF16, (WIDE,)).describe((WIDE, "amx_bf16", "avx2"))
    assert (
        line == "kernels: compiled (cpu: avx2, amx_bf16); dtype: bfloat16; products: our own, AVX-512, float32 from "
        "bfloat16 weights; threads: helpers that are not waited for"
    )
    assert all("\n" not in choice.describe(processor_features()) for choice in TABLE)


@pytest.mark.parametrize("backend", ["sim", "vllm"])
def test_kernels_of_another_backend_are_refused(backend: str) -> None:
    assert WorkerConfig(backend=backend).kernels == "auto"
    with pytest.raises(ValueError, match=f"--kernels is a setting of --backend native; --backend {backend} does not"):
        WorkerConfig(backend=backend, kernels="reference")
    assert WorkerConfig(kernels="reference").kernels == "reference"


def test_the_reference_serves_without_the_compiled_implementation() -> None:
    """Nor does anything else import numba: implementations for other devices run where there is none, and are imported
    where there is no device."""
    code = (
        "import sys; sys.modules['numba'] = sys.modules['llvmlite'] = None\n"
        "import torch\n"
        "import services.worker.backends.native\n"
        "import services.worker.kernels.cuda.kernels\n"
        "from services.worker.kernels.selection import choose, create\n"
        "create(choose('reference', 'cpu', torch.float32, ()))\n"
        "assert not any('kernels.cpu' in name for name in sys.modules)\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_products_that_round_in_another_way_have_another_arithmetic() -> None:
    """KV blocks that a processor with AMX has stored are not those of AVX-512. Float32 has the same bits everywhere."""
    ways = {(c.implementation, c.activations, *({*c.needs} - {WIDE})): c for c in TABLE if c.device == "cpu"}
    assert len({create(choice).network.arithmetic for choice in ways.values()}) == len(ways) == 5
    assert make("compiled", BF16, F32).network.arithmetic == make("compiled", F32).network.arithmetic


def test_compiled_kernels_inherit_only_plain_copies() -> None:
    """An operation that is forgotten would run in plain torch, slowly and with the same tokens."""
    compiled, plain = make("compiled"), make("reference")
    inherited = {
        name
        for group in ("network", "rows", "sampling", "drafting")
        for name, operation in vars(type(getattr(plain, group))).items()
        if callable(operation) and getattr(type(getattr(compiled, group)), name) is operation
    }
    assert inherited == {"write_prompt", "read_tokens", "upload", "lay_out", "verify", "write_tokens"}
    assert compiled.rows.loops is compiled.drafting.loops is not row_loops, "the loops of the last three are compiled"
