"""Kernels whose threads allocate from one heap compute what one thread computes.

A kernel that used memory after it was freed once answered a wrong token, but rarely: glibc usually gives each thread a
heap of its own. Here all threads of a process share one heap without thread caches, so freed memory is taken by
another thread at once.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.sampling import SamplingParams
from services.checkpoint import DEMO_MODEL
from services.worker.kernels.cpu import compiled
from services.worker.kernels.cpu.compiled import product
from tests.integration.native.driver import RunnerDriver

ONE_HEAP = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1"}
TOKENS = 40
WEIGHTS = ("none", "int8")
PROGRAM = f"import json; from {__name__} import WEIGHTS, outputs; print(json.dumps([outputs(4, w) for w in WEIGHTS]))"


def outputs(threads: int, quantization: str) -> list[list[int]]:
    """Tokens of greedy and of sampled requests. Several threads share small products, too."""
    if threads > 1:
        product.WORTH = 1
    driver = RunnerDriver(DEMO_MODEL, block_size=16, dtype="float32", threads=threads, quantization=quantization)
    params = [SamplingParams(1000, t, top_p=0.9, seed=seed) for seed, t in enumerate([0, 0, 0, 0.8, 0.8, 0.8])]
    prompts = [list(range(4 + number, 60 + 9 * number)) for number in range(len(params))]
    requests = [driver.add(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    driver.generate(requests, TOKENS, chunk=17)
    return [request.output for request in requests]


@pytest.mark.skipif(sys.platform != "linux", reason="helpers and GLIBC_TUNABLES are Linux's")
def test_threads_of_one_heap_compute_what_one_thread_does() -> None:
    several = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **ONE_HEAP}, check=True, stdout=subprocess.PIPE
    )
    assert json.loads(several.stdout) == [outputs(1, weights) for weights in WEIGHTS]


def test_no_kernel_takes_the_address_of_an_array() -> None:
    """See `raw.allocate`."""
    files = sorted(Path(compiled.__file__).parent.glob("*.py"))
    assert len(files) > 10
    assert [file.name for file in files if ".ctypes" in file.read_text()] == []
