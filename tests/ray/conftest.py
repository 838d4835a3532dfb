"""A cluster of three hosts, and the answers that every fault must leave as they are."""

import asyncio
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import serving
from tests.e2e.streams import answers_of
from tests.ray.cluster import Cluster
from tests.ray.hosts import Host, hosts, why_not

NATIVE = ("--threads", "1", "--kv-cache-memory-bytes", str(64 << 20))


@pytest.fixture(scope="session", autouse=True)
def _possible() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed; make test-ray installs it")
    if reason := why_not():
        pytest.skip(f"hosts of the test: {reason}")


@pytest.fixture(scope="session")
def expected() -> Any:
    """The answers of `runahead serve`, by a setting such as tensor_parallel_size=2, and by the number of `bodies`."""

    @cache
    def of(layout: str, times: int = 1) -> Any:
        with serving(*NATIVE, f"--{layout.replace('_', '-')}") as server:
            return asyncio.run(answers_of(server, times=times))

    return of


@pytest.fixture(scope="module")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    directory: Path = tmp_path_factory.mktemp("hosts")
    with hosts(3, directory) as found:
        yield found


@pytest.fixture(scope="module")
def cluster(three_hosts: list[Host]) -> Cluster:
    cluster = Cluster(three_hosts)
    cluster.start()
    return cluster
