"""Settings of all tests: garbage, Triton's interpreter, and temporary files where pytest removes them later."""

import atexit
import gc
import getpass
import os
import tempfile
from collections.abc import Generator, Iterator

import pytest

SUITES = ("unit", "simulation", "integration", "ranks", "e2e", "vllm", "docker", "gpu", "ray")
pytest.register_assert_rewrite(*(f"tests.{suite}" for suite in SUITES))
"""Modules that tests share get pytest's assertions: with the values of both sides, and under `python -O` too."""


os.environ.setdefault("TRITON_INTERPRET", "1")
"""Triton's interpreter stands for CUDA devices. Triton reads this when it is imported, which any suite may do first.
`tests/gpu` runs with 0."""
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
"""Threads of torch sleep while they wait for one another: processes of tests share the cores, and a thread that spins
takes one from the thread that it waits for."""


gc.disable()  # until all modules are imported


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave out what was imported when garbage is collected: vLLM does so in each epoch, pytest at its end."""
    collected = yield
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # otherwise libraries report leaks
    return collected


@pytest.fixture(scope="session", autouse=True)
def temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set the directory of temporary files, except for what torch compiles for vLLM and Triton for GPUs: the next run
    reuses what has not changed."""
    kept, user = tempfile.gettempdir(), getpass.getuser()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{kept}/torchinductor_{user}")
        patch.setenv("TRITON_CACHE_DIR", f"{kept}/triton_{user}")
        patch.setenv("TMPDIR", str(tmp_path_factory.getbasetemp()))
        patch.setattr(tempfile, "tempdir", None)
        yield
