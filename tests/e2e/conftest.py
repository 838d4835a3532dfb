import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.certificates import no_certificates  # noqa: F401  a fixture of all tests
from tests.e2e.server import ServeProcess, serving
from tests.waiting import PATIENCE, wait_until

if TYPE_CHECKING:
    from openai import OpenAI

LONGEST = [f"test_{name}.py" for name in ("roles", "engine_links", "engines", "many_ranks", "recovery", "poison")]
"""Files that take longest, in this order."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first: one process runs all tests of a file, and the others would wait for a late one."""
    places = [place for place, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    own = sorted((items[place] for place in places), key=lambda item: ranks.get(item.path.name, len(ranks)))
    for place, item in zip(places, own, strict=True):
        items[place] = item


@pytest.fixture(scope="session")
def server() -> Iterator[ServeProcess]:
    """The demo model in float32, as with `make serve`."""
    with serving() as running:
        yield running


@pytest.fixture(scope="session")
def sim() -> Iterator[ServeProcess]:
    """The simulator without delays. A short context bounds every output. The soak records it."""
    arguments = ("--backend=sim", "--sim-step-ms=0", "--sim-prefill-token-us=0", "--max-model-len=96")
    record = os.environ.get("RUNAHEAD_SOAK_RECORD")
    with serving(*arguments, "--enable-admin-routes", *(("--record", record) if record else ())) as running:
        yield running


@pytest.fixture
def unharmed(sim: ServeProcess) -> Iterator[None]:
    """Check after a test that the simulator's server runs, serves the next request and keeps nothing of others."""
    before = {name: process.pid for name, process in sim.services.items()}
    yield
    body = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"{sim.url}/v1/completions", json=body, timeout=PATIENCE)
    assert answer.json().get("usage", {}).get("completion_tokens") == 4, answer.text
    sim.find_services()
    assert {name: process.pid for name, process in sim.services.items()} == before
    wait_until(lambda: sim.metric("num_requests_running") + sim.metric("num_requests_waiting") == 0, "none is left")


@pytest.fixture(scope="session")
def undisturbed_sim() -> list[Any]:
    """The `answers` of the simulator, which do not depend on its delays and layout."""
    from tests.e2e.streams import answers_of

    with serving("--backend", "sim", "--sim-step-ms", "0") as running:
        return asyncio.run(answers_of(running))


@pytest.fixture(scope="session")
def client(server: ServeProcess) -> "Iterator[OpenAI]":
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def model(client: "OpenAI") -> str:
    return client.models.list().data[0].id
