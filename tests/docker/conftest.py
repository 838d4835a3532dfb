from collections.abc import Iterator

import pytest

from tests.docker.engine import Engine
from tests.docker.engine import engine as docker_engine
from tests.docker.stack import VERSION


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A Docker Engine with today's images."""
    with docker_engine() as running:
        running.build(running.base_image(), VERSION)
        yield running
