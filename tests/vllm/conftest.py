"""Tests of the vLLM backend, in an environment with vLLM (`make test-vllm`)."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.vllm.preloaded import processes

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore deprecations in other packages: vLLM reads attributes of every loaded module."""
    ignored = ("ignore::FutureWarning", "ignore::DeprecationWarning", r"ignore:\s*Encountered the use of a type")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(*ignored))


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    """Processes in which vLLM computes references."""
    with processes() as pool:
        yield pool
