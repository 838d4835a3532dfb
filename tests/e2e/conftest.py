from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.e2e.server import Server, serving


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The demo model in float32, as `make serve` would have it."""
    with serving() as running:
        yield running


@pytest.fixture(scope="session")
def sim() -> Iterator[Server]:
    """Answers that mean nothing, at once: a short context ends what asks for no end."""
    arguments = (
        "--backend",
        "sim",
        "--sim-step-ms",
        "0",
        "--sim-prefill-token-us",
        "0",
        "--max-model-len",
        "96",
    )
    with serving(*arguments) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id
