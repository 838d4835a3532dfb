"""Whatever tests and their processes leave behind, killed ones too, lies where pytest clears up after some runs."""

import getpass
import tempfile
from collections.abc import Iterator

import pytest

SUITES = ("unit", "simulation", "integration", "ranks", "e2e", "vllm", "docker")
pytest.register_assert_rewrite(*(f"tests.{suite}" for suite in SUITES))
"""What tests share asserts as they do: with both sides' values, and under `python -O` too."""


@pytest.fixture(scope="session", autouse=True)
def temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For temporary files; what torch compiles for vLLM stays where the next run finds it."""
    compiled = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", compiled)
        patch.setenv("TMPDIR", str(tmp_path_factory.getbasetemp()))
        patch.setattr(tempfile, "tempdir", None)
        yield
