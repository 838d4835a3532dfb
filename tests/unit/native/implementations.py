"""The implementations of the kernel interface, for tests that hold for each of them."""

import pytest
import torch

from protocol.rows import LogprobRows
from services.worker.backends.native.sampling.logprobs import download_scores
from services.worker.backends.native.sampling.sampler import SampledTokens
from services.worker.device.interface import ComputeDevice
from services.worker.kernels.interface.kernels import Kernels
from services.worker.kernels.selection import TABLE, create, processor_features

IMPLEMENTATIONS = ("compiled", "reference")
F32, BF16 = torch.float32, torch.bfloat16
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def scores_of(result: SampledTokens) -> LogprobRows:
    """The log-probabilities of a sampler's result, on the host."""
    assert result.logprobs is not None
    rows = download_scores([result.logprobs], ComputeDevice())()
    assert rows is not None
    return rows


def make(implementation: str, dtype: torch.dtype = F32, activations: torch.dtype | None = None) -> Kernels:
    """The first row of the table with these dtypes that this processor can compute; where it has no products of
    bfloat16, one whose other operations it can compute. `activations`: None: `dtype`."""
    kind = implementation, "cpu", dtype
    rows = [choice for choice in TABLE if (choice.implementation, choice.device, choice.dtype) == kind]
    rows = [c for c in rows if c.activations == (activations or dtype) or implementation == "reference"]
    return create(next((c for c in rows if {*c.needs} <= processor_features()), rows[-1]))
