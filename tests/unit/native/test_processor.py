"""The variables with which `make test-avx2` runs the kernels as on a processor with AVX2 only."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

VARIABLES = Path(__file__).parents[2] / "avx2.env"
REPORT = """
import json, numba, numpy, torch
from services.worker.kernels.selection import choose, processor_features

@numba.njit
def double(values):
    for i in range(len(values)):
        values[i] *= 2

double(numpy.ones(64, numpy.float32))
[code] = double.inspect_asm().values()
print(json.dumps({
    "torch": torch.backends.cpu.get_cpu_capability(),
    "numba": [name for name in ("ymm", "zmm") if name in code],
    "bfloat16": str(choose("auto", "cpu", torch.bfloat16, processor_features()).activations),
}))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is an extension of x86-64")
def test_every_library_computes_with_avx2() -> None:
    """Neither torch nor numba uses wider vectors."""
    variables = dict(line.split("=", 1) for line in VARIABLES.read_text().splitlines())
    process = subprocess.run(
        [sys.executable, "-c", REPORT], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    assert json.loads(process.stdout) == {"torch": "AVX2", "numba": ["ymm"], "bfloat16": "torch.float32"}
