from collections.abc import Iterator

import pytest

from tests.integration.frontend.scripted import Frontend, ScriptedScheduler, scripted, silent
from tests.integration.frontend.test_embeddings import EMBEDS, embedding


@pytest.fixture(scope="session")
def _pair() -> Iterator[tuple[Frontend, ScriptedScheduler]]:
    with scripted(served_model_name=["demo", "alias"]) as pair:
        yield pair


@pytest.fixture(scope="session")
def _embedding_pair() -> Iterator[tuple[Frontend, ScriptedScheduler]]:
    with scripted(state=EMBEDS, served_model_name=["demo"]) as pair:
        yield pair


@pytest.fixture
def engine(_embedding_pair: tuple[Frontend, ScriptedScheduler]) -> ScriptedScheduler:
    """The scheduler of a model whose hidden states become embeddings, and of `embedder`."""
    _embedding_pair[1].script(embedding)
    return _embedding_pair[1]


@pytest.fixture
def embedder(_embedding_pair: tuple[Frontend, ScriptedScheduler], engine: ScriptedScheduler) -> Frontend:
    return _embedding_pair[0]


@pytest.fixture
def frontend(_pair: tuple[Frontend, ScriptedScheduler]) -> Frontend:
    """One process, shared by all tests that do not change its state."""
    return _pair[0]


@pytest.fixture
def scheduler(_pair: tuple[Frontend, ScriptedScheduler]) -> ScriptedScheduler:
    _pair[1].script(silent)
    return _pair[1]


@pytest.fixture(params=[False, True])
def stream(request: pytest.FixtureRequest) -> bool:
    """Each test with it is run for an answer that is sent as a whole, and for one that is streamed."""
    return request.param  # type: ignore[no-any-return]
