"""The head is lost: streams, engines and frontends go on. With Redis it comes back with all that it knew."""

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.server import wait_until
from tests.e2e.streams import answers_of
from tests.ray.cluster import Cluster, HttpFrontend, engines, serves
from tests.ray.hosts import TEST_ADDRESS, Host

LAYOUT = "tensor_parallel_size=2"
REDIS_PORT = 6390


@pytest.fixture
def with_redis(three_hosts: list[Host]) -> Iterator[Cluster]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    command = [
        "redis-server",
        "--port",
        str(REDIS_PORT),
        "--bind",
        TEST_ADDRESS,
        "--save",
        "",
        "--protected-mode",
        "no",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as redis:
        cluster = Cluster(
            three_hosts, RAY_REDIS_ADDRESS=f"{TEST_ADDRESS}:{REDIS_PORT}", RAY_gcs_rpc_server_reconnect_timeout_s="600"
        )
        cluster.start()
        yield cluster
        redis.kill()


async def _lose(host: Host) -> None:
    await asyncio.to_thread(host.kill)


def test_without_redis_streams_go_on_until_they_end(three_hosts: list[Host], expected: Any) -> None:
    cluster, head = Cluster(three_hosts), three_hosts[0]
    cluster.start()
    cluster.serve(LAYOUT, "data_parallel_size=2", "api_server_count=3")
    frontend = HttpFrontend(cluster.hosts[2], 8001)
    wait_until(serves(frontend, 2), "two engines serve")
    assert asyncio.run(answers_of(frontend, lambda: _lose(head))) == expected(LAYOUT)
    assert asyncio.run(answers_of(frontend)) == expected(LAYOUT), "requests are answered without a head"
    head.boot()
    for host in cluster.hosts[1:]:  # `ray stop`
        host.kill()
        host.boot()
    cluster.start()
    assert cluster.status() == {}, "this head knows nothing"
    cluster.serve(LAYOUT)
    assert asyncio.run(answers_of(cluster.frontends()[0])) == expected(LAYOUT)
    for host in cluster.hosts:
        host.kill()
        host.boot()


def test_streams_do_not_notice_that_the_head_is_lost_and_comes_back(with_redis: Cluster, expected: Any) -> None:
    cluster, head = with_redis, with_redis.hosts[0]
    cluster.serve(LAYOUT, "data_parallel_size=2", "api_server_count=3")
    frontend = HttpFrontend(cluster.hosts[2], 8001)
    wait_until(serves(frontend, 2), "two engines serve")

    assert asyncio.run(answers_of(frontend, lambda: _lose(head))) == expected(LAYOUT)
    assert "ready" in engines(frontend).values()
    assert asyncio.run(answers_of(frontend)) == expected(LAYOUT), "requests are answered without a head"
    head.boot()
    cluster.start_node(head)
    wait_until(lambda: [*engines(frontend).values()].count("ready") == 2, "Serve has replaced what was on the head")
    assert asyncio.run(answers_of(frontend)) == expected(LAYOUT)
    wait_until(serves(frontend, 2), "no other engine is known")
