"""Choice of kernels by device, dtype and processor features: one table. The worker logs its row when it loads.

The first row counts that has the requested implementation (`--kernels`; "auto" accepts any), the device and the dtype,
and whose features the processor has.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch

from services.worker.backends.native.kernels.interface import Kernels
from services.worker.runner import LoadError

Implementation = Literal["compiled", "reference"]
ONEDNN_BFLOAT16 = "onednn_bfloat16"
"""oneDNN computes bfloat16 products and packs weights for them."""
NAMED = ("avx2", "avx512_f", "avx512_bf16", "amx_bf16")
"""Processor features that the log names, and that a row may need."""


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

    def describe(self, features: Collection[str]) -> str:
        """Return one line for the log."""
        here = ", ".join(name for name in NAMED if name in features) or "baseline"
        return (
            f"kernels: {self.implementation} ({self.device}: {here}); products: {self.products}; "
            f"threads: {self.threads}"
        )


_HELPERS = "helpers that are not waited for"
TABLE = (
    KernelChoice("compiled", "cpu", torch.float32, (), torch.float32, "our own, float32", _HELPERS),
    KernelChoice(
        *("compiled", "cpu", torch.bfloat16, (ONEDNN_BFLOAT16,), torch.bfloat16),
        *("oneDNN, bfloat16", "torch's OpenMP threads"),
    ),
    # Without bfloat16 arithmetic torch's own bfloat16 products take three to seven times as long as float32 ones.
    KernelChoice(
        *("compiled", "cpu", torch.bfloat16, (), torch.float32),
        *("our own, float32 from bfloat16 weights", _HELPERS),
    ),
    KernelChoice("reference", "cpu", torch.float32, (), torch.float32, "torch, float32", "torch's"),
    KernelChoice("reference", "cpu", torch.bfloat16, (), torch.bfloat16, "torch, bfloat16", "torch's"),
)


def choose(wanted: str, device: str, dtype: torch.dtype, features: Collection[str]) -> KernelChoice:
    """Return the first row of the table that fits; `wanted` is "auto" or an implementation.

    Raises: LoadError, if there is none.
    """
    for choice in TABLE:
        fits = wanted in ("auto", choice.implementation) and (choice.device, choice.dtype) == (device, dtype)
        if fits and set(choice.needs) <= set(features):
            return choice
    raise LoadError(f"no kernels ({wanted}) compute {dtype} on {device!r}; use --kernels auto")


def create(choice: KernelChoice) -> Kernels:
    """Return the implementation. It is imported only when it is chosen."""
    match choice.implementation:
        case "compiled":
            from services.worker.backends.native.kernels.cpu.kernels import CpuKernels

            return CpuKernels(choice.activations, choice.dtype)
        case "reference":
            from services.worker.backends.native.kernels.reference.kernels import ReferenceKernels

            return ReferenceKernels(choice.activations)


def processor_features() -> frozenset[str]:
    """Return the features of this machine's processor: those in `NAMED`, and those of torch's libraries."""
    found = {name for name, has in torch.cpu.get_capabilities().items() if has is True and name in NAMED}
    if torch.backends.mkldnn.is_available():
        supported = torch.ops.mkldnn._is_mkldnn_bf16_supported  # noqa: SLF001  torch has no public query
        found |= {ONEDNN_BFLOAT16} if supported() else set()
    return frozenset(found)
