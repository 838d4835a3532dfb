"""Choice of kernels by device, dtype and processor features: one table. The worker logs its row when it loads.

The first row counts that has the requested implementation (`--kernels`; "auto" accepts any), the device and the dtype,
whose features the processor has, and that computes with quantised weights or batch-invariantly where that is requested.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch

from services.worker.device.cuda import CudaDevice
from services.worker.kernels.interface.kernels import Kernels
from services.worker.runner import LoadError

Implementation = Literal["compiled", "reference"]
WIDE = "wide"
"""Our own kernels can use AVX-512."""
TILES = "tiles"
"""Our own kernels can use AMX, with bfloat16 arithmetic of AVX-512 beside it."""
PAIRS = "pairs"
"""Our own kernels can use AVX-512's products of bfloat16 pairs."""
OWN_BFLOAT16 = (TILES, PAIRS)
NAMED = ("avx2", "avx512_f", "avx512_bf16", "amx_bf16")
"""Processor features that the log names, and that a row may need."""

_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18
"""arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) on x86-64."""


@dataclass(frozen=True)
class KernelChoice:
    """A row of the table."""

    implementation: Implementation
    device: str
    dtype: torch.dtype
    """dtype of weights and KV cache."""
    needs: tuple[str, ...]
    """Required features of the processor."""
    activations: torch.dtype
    """dtype that products read and write."""
    products: str
    """Text for the log."""
    threads: str
    """Text for the log."""
    quantized: bool = True
    """The row computes fast with int8 and int4 weights."""
    invariant: bool = True
    """A row of a batch has the same bits in a batch of any size."""
    eager: bool = False
    """Launch kernels one by one on a GPU, where graphs could be recorded."""
    few_rows: bool = False
    """Multiply quantised weights as whole numbers, although the processor has AMX's products of bfloat16, which are
    faster with many rows and slower with few."""

    @property
    def own(self) -> str | None:
        """The feature with which products of bfloat16 activations are computed; None: activations are float32."""
        return next((feature for feature in self.needs if feature in OWN_BFLOAT16), None)

    @property
    def wide(self) -> bool:
        """Products of float32 activations use AVX-512, which each of these features needs."""
        return bool({WIDE, *OWN_BFLOAT16} & {*self.needs})

    def describe(self, features: Collection[str]) -> str:
        """Return one line for the log. `features`: of the device."""
        products = f"{self.products}, and quantised weights as whole numbers" if self.few_rows else self.products
        named = features if self.device == "cuda" else [name for name in NAMED if name in features]
        here = ", ".join(named) or "baseline"
        return (
            f"kernels: {self.implementation} ({self.device}: {here}); dtype: {str(self.dtype).removeprefix('torch.')}; "
            f"products: {products}; threads: {self.threads}"
        )


F32, BF16 = torch.float32, torch.bfloat16
_HELPERS = "helpers that are not waited for"
TABLE = (
    KernelChoice("compiled", "cpu", F32, (WIDE,), F32, "our own, AVX-512, float32", _HELPERS),
    KernelChoice("compiled", "cpu", F32, (), F32, "our own, float32", _HELPERS),
    KernelChoice("compiled", "cpu", BF16, (TILES,), BF16, "our own, AMX, bfloat16", _HELPERS),
    KernelChoice("compiled", "cpu", BF16, (PAIRS,), BF16, "our own, AVX-512, bfloat16", _HELPERS),
    # Without bfloat16 arithmetic, products of bfloat16 by oneDNN and torch take two to seven times as long as these.
    KernelChoice("compiled", "cpu", BF16, (WIDE,), F32, "our own, AVX-512, float32 from bfloat16 weights", _HELPERS),
    KernelChoice("compiled", "cpu", BF16, (), F32, "our own, float32 from bfloat16 weights", _HELPERS),
    KernelChoice("compiled", "cuda", F32, (), F32, "cuBLAS, float32", "the device's", False, False),
    KernelChoice("compiled", "cuda", BF16, (), BF16, "cuBLAS, bfloat16", "the device's", False, False),
    KernelChoice("reference", "cpu", F32, (), F32, "torch, float32", "torch's", invariant=False),
    KernelChoice("reference", "cpu", BF16, (), BF16, "torch, bfloat16", "torch's", invariant=False),
)


def choose(
    wanted: str,
    device: str,
    dtype: torch.dtype,
    features: Collection[str],
    quantized: bool = False,
    invariant: bool = False,
    eager: bool = False,
    few_rows: bool = False,
) -> KernelChoice:
    """Return the first row of the table that fits, with `eager` as wanted, and `few_rows` where it makes a difference.

    Args:
        wanted: "auto" or an implementation
        quantized: most weights are int8 or int4
        invariant: a row must have the same bits in a batch of any size

    Raises: LoadError, if there is none.
    """
    for choice in TABLE:
        fits = wanted in ("auto", choice.implementation) and (choice.device, choice.dtype) == (device, dtype)
        able = choice.quantized >= quantized and choice.invariant >= invariant
        if fits and able and set(choice.needs) <= set(features):
            return replace(choice, eager=eager, few_rows=few_rows and quantized and TILES in choice.needs)
    kind = " with quantised weights" if quantized else ""
    promise = " independently of the batch (--batch-invariant)" if invariant else ""
    remedy = "--kernels auto" if device == "cpu" else "--device cpu"
    raise LoadError(f"no kernels ({wanted}) compute {dtype} on {device!r}{kind}{promise}; use {remedy}")


def create(choice: KernelChoice) -> Kernels:
    """Return the implementation. It is imported only when it is chosen.

    Raises: LoadError, if packages of the implementation are missing.
    """
    match choice.device, choice.implementation:
        case "cuda", _:
            return _cuda_kernels(choice)
        case _, "compiled":
            from services.worker.kernels.cpu.kernels import CpuKernels

            return CpuKernels(choice)
        case _, "reference":
            return Kernels(choice.activations)


def _cuda_kernels(choice: KernelChoice) -> Kernels:
    """Raises: LoadError, if Triton is not installed."""
    try:
        from services.worker.kernels.cuda.kernels import CudaKernels
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        raise LoadError("--device cuda needs the package triton, which a CUDA build of torch brings along") from error
    return CudaKernels(choice.activations, CudaDevice(), choice.eager)


def device_features(device: str) -> frozenset[str]:
    """Return the features of the processor, or the name of the GPU."""
    return frozenset({torch.cuda.get_device_name()}) if device == "cuda" else processor_features()


def processor_features() -> frozenset[str]:
    """Return the features of this machine's processor: those in `NAMED`, and those that our own kernels can use."""
    found = {name for name, has in torch.cpu.get_capabilities().items() if has is True and name in NAMED}
    # numba may compile for another processor, which its variables name
    if "avx512_f" in found and not {"NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"} & {*os.environ}:
        found.add(WIDE)
        if "avx512_bf16" in found:
            found.add(PAIRS)
            if "amx_bf16" in found and _may_use_tiles():
                found.add(TILES)
    return frozenset(found)


@cache
def _may_use_tiles() -> bool:
    """Request the state of AMX's tiles, which Linux gives a process on request only."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) == 0)
