"""The implementations of the kernel interface, for tests that hold for each of them."""

import pytest
import torch

from services.worker.backends.native.kernels.interface.kernels import Kernels
from services.worker.backends.native.kernels.selection import TABLE, create

IMPLEMENTATIONS = ("compiled", "reference")
F32, BF16 = torch.float32, torch.bfloat16
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def make(implementation: str, dtype: torch.dtype = F32, activations: torch.dtype | None = None) -> Kernels:
    """One row of the table; `activations` choose between those for one dtype."""
    wanted = activations or dtype
    rows = [c for c in TABLE if (c.implementation, c.dtype) == (implementation, dtype)]
    return create(next(c for c in rows if c.activations == wanted or implementation == "reference"))
