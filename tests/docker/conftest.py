from collections.abc import Iterator

import pytest

from tests.docker.engine import DockerEngine, docker_engine
from tests.docker.stack import VERSION


@pytest.fixture(scope="session")
def engine() -> Iterator[DockerEngine]:
    """A Docker engine with images of the current sources."""
    with docker_engine() as running:
        running.build(running.base_image(), VERSION)
        yield running
