"""Fixtures of the cases of the kernels: `tests/gpu` runs the same cases on a GPU, with fixtures of the same names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

KernelMaker = Callable[..., Any]
"""Fixture `make`: makes kernels for a dtype, float32 by default, that take tensors of the host."""
each_dtype = pytest.mark.parametrize("dtype", ["float32", "half"], indirect=True)
"""Fixture `dtype`: float32, or the half type that the kernels are tested with."""
Limits = dict[str, float]
"""Arguments of `torch.testing.assert_close`."""


@dataclass(frozen=True)
class Accuracy:
    """Fixture `accuracy`: largest differences from the reference."""

    exact: Limits
    """For operations that the interpreter computes bit for bit."""
    network: dict[torch.dtype, Limits]
    attention: dict[torch.dtype, Limits]
