"""Every kernel compiles for a device; the interpreter accepts programs that the compiler refuses."""

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.native.cuda.tiny_engine import write_tiny_model

KERNELS = {
    "attention_kernel", "best_kernel", "bias_kernel", "count_kernel", "cutoff_kernel",
    "forbid_words_kernel", "gate_kernel", "gather_kernel", "layout_kernel",
    "mask_kernel", "merge_kernel", "norm_kernel", "penalize_kernel", "write_kernel",
}  # fmt: skip


def test_every_kernel_compiles_for_compute_capability_9(tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    model = write_tiny_model(tmp_path / "model")
    command = [sys.executable, "-m", "tests.unit.native.cuda.compiled_for_hopper", str(model)]
    result = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    assert {line.split()[0] for line in result.stdout.splitlines()} == KERNELS
