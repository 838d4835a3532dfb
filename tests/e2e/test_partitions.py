"""Links between services that break, stop forwarding in one direction, or are slow: /readyz tells, and no stream
differs from one without the fault."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.proxy import FAULTS, LinkFault, TcpProxy
from tests.e2e.separate import SeparateServices, separate_services
from tests.e2e.streams import answers, assert_nothing_is_kept

LINKS = ("frontend", "worker")
soak = pytest.mark.soak


@pytest.fixture(scope="module")
def services() -> Iterator[SeparateServices]:
    with separate_services() as running:
        yield running


def link_of(services: SeparateServices, name: str) -> TcpProxy:
    return services.frontend_link() if name == "frontend" else services.worker_link()


@pytest.mark.soak
def test_a_worker_that_receives_no_plans_connects_again(services: SeparateServices) -> None:
    """Its other connection works, and so would a new one: the fault need not end."""
    services.wait_readyz()
    services.proxies.do(services.worker_link().stall_plans())
    services.wait_readyz(False)
    services.wait_readyz()
    assert "sends nothing on the connection for plans" in services.log("worker-0").read_text()
    services.proxies.do(services.worker_link().restore())


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        pytest.param("frontend", "deaf scheduler", marks=soak),
        ("frontend", "mute scheduler"),
        pytest.param("frontend", "cut", marks=soak),
        ("worker", "deaf scheduler"),
        pytest.param("worker", "mute scheduler", marks=soak),
        pytest.param("worker", "cut", marks=soak),
    ],
)
async def test_streams_go_on_when_the_link_is_back(
    services: SeparateServices, undisturbed_sim: list[Any], link: str, fault: str
) -> None:
    proxy, do = link_of(services, link), services.proxies.do

    async def disturb() -> None:
        do(FAULTS[fault](proxy))
        await asyncio.to_thread(services.wait_readyz, False)
        do(proxy.restore())

    services.wait_readyz()
    async with services.async_client() as client:
        assert await answers(client, disturb) == undisturbed_sim
    services.wait_readyz()
    assert_nothing_is_kept(services)


@pytest.mark.parametrize("link", ["frontend", pytest.param("worker", marks=soak)])
async def test_a_slow_link_changes_no_stream(services: SeparateServices, undisturbed_sim: list[Any], link: str) -> None:
    proxy, do = link_of(services, link), services.proxies.do
    services.wait_readyz()
    do(proxy.delay(0.1))
    try:
        async with services.async_client() as client:
            assert await answers(client) == undisturbed_sim
    finally:
        do(proxy.restore())


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
async def test_streams_go_on_after_random_faults_of_both_links(
    services: SeparateServices, undisturbed_sim: list[Any], seed: int
) -> None:
    """Each lasts for less or for longer than a service waits for another one."""
    rng, do = random.Random(seed), services.proxies.do

    async def disturb() -> None:
        for _ in range(3):
            proxy = link_of(services, rng.choice(LINKS))
            slow: LinkFault = lambda link: link.delay(0.2)  # noqa: E731
            do(rng.choice([*FAULTS.values(), TcpProxy.stall_plans, slow])(proxy))
            await asyncio.sleep(rng.choice((0.2, 1.0, 5.0)) * rng.random())
            do(proxy.restore())
            await asyncio.sleep(rng.random())

    services.wait_readyz()
    async with services.async_client() as client:
        assert await answers(client, disturb) == undisturbed_sim
    services.wait_readyz()
    assert_nothing_is_kept(services)
