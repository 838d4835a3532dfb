"""Faults of processes, actors, nodes and the network under streams: no token is lost, repeated or changed.

Two engines of two ranks, and a frontend on every host. The ranks of an engine are a tensor-parallel group on one of
three hosts, or pipeline stages on two. The test uses the frontend of a host that the fault does not touch.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.e2e.server import wait_until
from tests.e2e.streams import answers, assert_nothing_is_kept
from tests.ray.cluster import ENGINE, FRONTEND, RANK, SCHEDULER, Cluster, HttpFrontend, engines, serves
from tests.ray.hosts import Host

LAYOUTS = {
    "tensor_parallel_size=2": "placement_group_strategy=PACK",
    "pipeline_parallel_size=2": "placement_group_strategy=SPREAD",
}
TIMES = 2
"""Sixteen streams as often."""
SCHEDULER_CHILD, RANK_CHILD = "services.cli.child scheduler", "services.cli.child worker"
gaps: dict[str, float] = {}
"""Longest time between two tokens of a stream, seconds, by fault."""


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(cluster: Cluster, layout: str) -> Iterator[Cluster]:
    cluster.serve(layout, LAYOUTS[layout], "data_parallel_size=2", "api_server_count=3")
    gaps.clear()
    yield cluster
    print(f"\n{layout}: fault{'longest pause of a stream, s':>60}")
    for name, seconds in gaps.items():
        print(f"{name:60} {seconds:6.1f}")


@pytest.fixture
def answers_without_fault(expected: Any, layout: str) -> Any:
    return expected(layout, TIMES)


def hosts_with(cluster: Cluster, title: str) -> list[Host]:
    return [host for host in cluster.hosts if host.processes(title)]


def away_from(cluster: Cluster, *hosts: Host) -> HttpFrontend:
    """Return the frontend of another host."""
    host = next(host for host in cluster.hosts if host not in hosts)
    return HttpFrontend(host, 8001)


async def disturbed(frontend: HttpFrontend, fault: Callable[[], object], name: str) -> list[Any]:
    """Return the answers, and note the longest pause of a stream."""
    last, longest = dict[int, float](), 0.0

    def on_text(number: int, _: str) -> None:
        nonlocal longest
        now = time.monotonic()
        longest = max(longest, now - last.get(number, now))
        last[number] = now

    async def strike() -> None:
        await asyncio.to_thread(fault)

    async with frontend.async_client() as client:
        found = await answers(client, strike, on_text, times=TIMES)
    gaps[name] = longest
    return found


def survive(
    cluster: Cluster,
    frontend: HttpFrontend,
    expected: Any,
    fault: Callable[[], object],
    name: str,
    repair: Callable[[], object] = lambda: None,
) -> None:
    """`repair`: what an operator does afterwards."""
    wait_until(serves(frontend, 2), "two engines serve")
    assert asyncio.run(disturbed(frontend, fault, name)) == expected
    repair()
    wait_until(serves(frontend, 2), "two engines serve again")
    assert_nothing_is_kept(frontend)


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("title", [RANK_CHILD, RANK, SCHEDULER_CHILD, SCHEDULER, ENGINE])
def test_a_process_is_killed(served: Cluster, answers_without_fault: Any, title: str) -> None:
    host = hosts_with(served, title)[0]
    frontend = away_from(served, host)
    survive(served, frontend, answers_without_fault, lambda: kill(host.processes(title)[:1]), f"killed: {title}")


def test_a_frontend_is_killed_and_the_streams_of_another_go_on(served: Cluster, answers_without_fault: Any) -> None:
    host = served.hosts[2]
    survive(
        served,
        away_from(served, host),
        answers_without_fault,
        lambda: kill(host.processes(FRONTEND)),
        "killed: a frontend",
    )
    wait_until(lambda: len(served.frontends()) == 3, "the frontend is there again")


@pytest.mark.parametrize("seconds", [5, 60])
def test_a_host_is_unplugged(served: Cluster, answers_without_fault: Any, seconds: int) -> None:
    host = next(host for host in hosts_with(served, RANK) if host is not served.hosts[0])

    def fault() -> None:
        host.plug(False)
        time.sleep(seconds)
        host.plug()

    def repair() -> None:
        if seconds == 60:  # Ray has given the node up, and its raylet ends when it hears of it
            wait_until(lambda: not host.processes("raylet/raylet"), "the raylet has ended")
            served.start_node(host)

    name = f"unplugged for {seconds} s"
    survive(served, away_from(served, host), answers_without_fault, fault, name, repair)
    wait_until(lambda: len(served.frontends()) == 3, "a frontend on every host")


def test_a_node_loses_its_power(served: Cluster, answers_without_fault: Any) -> None:
    host = next(host for host in hosts_with(served, SCHEDULER) if host is not served.hosts[0])
    frontend = away_from(served, host)

    def repair() -> None:
        host.boot()
        served.start_node(host)

    survive(served, frontend, answers_without_fault, host.kill, "a node with a scheduler lost power", repair)


def test_engines_that_ray_has_replaced_are_forgotten(served: Cluster) -> None:
    frontend = HttpFrontend(served.hosts[0], 8001)
    wait_until(serves(frontend, 2), "two engines serve")
    assert len(engines(frontend)) == 2
