"""The cases of the kernels under Triton's interpreter."""

import pytest
import torch

from tests.unit.native.cuda.kernel_cases import Accuracy, KernelMaker
from tests.unit.native.interpreted import interpreted_kernels


@pytest.fixture
def make() -> KernelMaker:
    return interpreted_kernels


@pytest.fixture
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """float16 as the half type: the interpreter's products of bfloat16 are garbage."""
    return torch.float32 if request.param == "float32" else torch.float16


@pytest.fixture
def accuracy() -> Accuracy:
    return Accuracy(
        {"atol": 0.0, "rtol": 0.0},
        {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.float16: {"atol": 2e-2, "rtol": 1e-2}},
        {torch.float32: {"atol": 3e-6, "rtol": 1e-5}, torch.float16: {"atol": 5e-3, "rtol": 1e-2}},
    )
