"""The suite of the vLLM backend; it runs in an environment that has vLLM (`make test-vllm`)."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM looks into every module that is loaded, and so wakes other people's deprecations; and has numba's."""
    ignored = (
        "ignore::FutureWarning",
        "ignore::DeprecationWarning",
        r"ignore:\s*Encountered the use of a type",
    )
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(*ignored))
