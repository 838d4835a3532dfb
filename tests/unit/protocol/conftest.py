"""Endpoints in a private directory, and a server."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.transport import Server
from tests.unit.protocol.peers import opened


@pytest.fixture(autouse=True)
def _clients_end() -> Iterator[None]:
    with opened:
        yield


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a short path, because an ipc path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="runahead-") as name:
        yield Path(name)


@pytest.fixture
def endpoint(directory: Path) -> str:
    return f"ipc://{directory}/socket"


@pytest.fixture
def server(endpoint: str) -> Iterator[Server]:
    server = Server(endpoint, {"worker", "frontend"})
    yield server
    server.close()
