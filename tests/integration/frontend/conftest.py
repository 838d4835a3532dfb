from collections.abc import Iterator

import pytest

from tests.integration.frontend.scripted import Frontend, ScriptedScheduler, scripted, silent


@pytest.fixture(scope="session")
def _pair() -> Iterator[tuple[Frontend, ScriptedScheduler]]:
    with scripted(served_model_name=["demo", "alias"]) as pair:
        yield pair


@pytest.fixture
def frontend(_pair: tuple[Frontend, ScriptedScheduler]) -> Frontend:
    """One process, shared by all tests that do not change its state."""
    return _pair[0]


@pytest.fixture
def scheduler(_pair: tuple[Frontend, ScriptedScheduler]) -> ScriptedScheduler:
    _pair[1].script(silent)
    return _pair[1]
