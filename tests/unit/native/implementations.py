"""The implementations of the kernel interface, for tests that hold for each of them."""

import pytest
import torch

from protocol.rows import LogprobRows
from services.worker.backends.native.sampling.logprobs import ScoresOnTheirWay
from services.worker.backends.native.sampling.sampler import SampledTokens
from services.worker.device.cpu import CpuDevice
from services.worker.kernels.interface.kernels import Kernels
from services.worker.kernels.selection import OWN_BFLOAT16, TABLE, WIDE, create, processor_features

IMPLEMENTATIONS = ("compiled", "reference")
F32, BF16 = torch.float32, torch.bfloat16
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def scores_of(result: SampledTokens) -> LogprobRows:
    """The log-probabilities of a sampler's result, on the host."""
    assert result.logprobs is not None
    rows = ScoresOnTheirWay.begin([result.logprobs], CpuDevice()).get()
    assert rows is not None
    return rows


def make(implementation: str, dtype: torch.dtype = F32, activations: torch.dtype | None = None) -> Kernels:
    """One row of the table, without our own products of bfloat16; `activations` choose between those for one dtype."""
    wanted, excluded = activations or dtype, {*OWN_BFLOAT16, WIDE} - (processor_features() & {WIDE})
    rows = [c for c in TABLE if (c.implementation, c.dtype) == (implementation, dtype) and not excluded & {*c.needs}]
    return create(next(c for c in rows if c.activations == wanted or implementation == "reference"))
