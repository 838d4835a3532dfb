"""Tests that need an NVIDIA GPU. Elsewhere each is skipped with the reason. `docs/gpu.md` says how to run them."""

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

    from tests.unit.native.cuda.kernel_cases import Accuracy, KernelMaker


def reason() -> str | None:
    """Return why the tests cannot run here, or None."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build for CPUs"
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "Triton interprets kernels in this run; set TRITON_INTERPRET=0 and run tests/gpu alone"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if (why := reason()) is not None:
        for item in items:
            if "tests/gpu/" in item.nodeid or item.path.parent.name == "gpu":
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture
def make() -> "KernelMaker":
    from tests.gpu.host_kernels import gpu_kernels

    return gpu_kernels


@pytest.fixture
def dtype(request: pytest.FixtureRequest) -> "torch.dtype":
    """bfloat16 as the half type, as served."""
    import torch

    return torch.float32 if request.param == "float32" else torch.bfloat16


@pytest.fixture
def accuracy() -> "Accuracy":
    """A GPU has its own exponential function, and joins a product and a sum in one operation."""
    import torch

    from tests.unit.native.cuda.kernel_cases import Accuracy

    return Accuracy(
        {"atol": 1e-6, "rtol": 1e-6},
        {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2}},
        {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, torch.bfloat16: {"atol": 3e-2, "rtol": 3e-2}},
    )
