"""Processes that start with vLLM imported, which takes longer than most tests."""

import gc
import multiprocessing
import multiprocessing.forkserver
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.server import ServeProcess, serving

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # vLLM's engine and worker in one process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

MODULES = [
    "services.worker.backends.vllm.media_processor",
    "vllm.v1.worker.cpu_worker",
    "tests.vllm.reference",
    "tests.vllm.driver",
    "services.cli.serve",
    "services.cli.start",
    "services.frontend.service",
    "services.scheduler.service",
    "services.worker.service",
    "tests.forked_helpers",
    "tests.ranks.process",
]
"""vLLM first: it does not import where numba was imported before."""


@contextmanager
def processes() -> Iterator[ProcessPoolExecutor]:
    """A pool that runs two functions at a time, each in a new process with one compute thread."""
    before = dict(os.environ)
    os.environ |= ENVIRONMENT  # the fork server inherits it
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    try:
        multiprocessing.forkserver.ensure_running()
        with ProcessPoolExecutor(2, context, gc.freeze, max_tasks_per_child=1) as pool:
            yield pool
    finally:
        os.environ.clear()
        os.environ |= before


@contextmanager
def serving_preloaded(model: Path, *arguments: str, patch: str = "") -> Iterator[ServeProcess]:
    """`serve` of a model; vLLM is imported once for all workers and restarts."""
    with processes():  # starts the fork server
        pass
    with serving(
        str(model), "--backend", "vllm", "--enforce-eager", "--threads", "1", "--block-size", "32", "--dtype",
        "float32", "--kv-cache-memory-bytes", str(64 << 20), *arguments, patch=patch,
    ) as running:  # fmt: skip
        yield running
