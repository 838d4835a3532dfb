"""The CUDA path needs neither numba nor a device when it is imported."""

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["numba"] = None  # an import of numba raises ModuleNotFoundError
import torch
import services.worker.kernels.selection
import services.worker.kernels.cuda.kernels
assert not torch.cuda.is_initialized()
"""


def test_import_without_numba_and_without_a_device() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
