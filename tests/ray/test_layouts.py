"""Engines that Ray places within a host and across two give the tokens of `runahead serve`, by every way to them."""

import asyncio
import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from openai import RateLimitError

from tests.e2e.server import wait_until
from tests.e2e.streams import answers_of
from tests.ray.cluster import PROXY_PORT, RANK, Cluster, HttpFrontend, serves

TENSOR, PIPELINE = "tensor_parallel_size=2", "pipeline_parallel_size=2"


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD"])
@pytest.mark.parametrize("layout", [TENSOR, PIPELINE])
def test_tokens_are_those_of_serve(
    cluster: Cluster, expected: Callable[[str], Any], layout: str, strategy: str
) -> None:
    cluster.serve(layout, f"placement_group_strategy={strategy}", "api_server_count=3")
    assert sum(bool(host.processes(RANK)) for host in cluster.hosts) == (2 if strategy == "SPREAD" else 1)
    frontends = cluster.frontends()
    assert len(frontends) == 3
    for frontend in frontends:
        wait_until(serves(frontend, 1), "the engine of this deployment serves, and no other")
    for way in (frontends[0], frontends[2], HttpFrontend(cluster.hosts[1], PROXY_PORT)):
        assert asyncio.run(answers_of(way)) == expected(layout)


def test_an_answer_without_a_stream_passes_the_proxy(cluster: Cluster) -> None:
    proxy = HttpFrontend(cluster.hosts[0], PROXY_PORT)
    body = json.dumps({"prompt": "The", "max_tokens": 5, "temperature": 0}).encode()
    request = urllib.request.Request(f"{proxy.url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 5
    refused = urllib.request.Request(f"{proxy.url}/v1/completions", b"{", {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(refused, timeout=30)
    with caught.value as error:
        assert error.code == 400
        assert "error" in json.load(error)


def test_overload_is_refused_behind_the_proxy_and_not_queued(cluster: Cluster) -> None:
    cluster.serve("max_open_requests=1")
    proxy = HttpFrontend(cluster.hosts[0], PROXY_PORT)

    async def overload() -> None:
        async with proxy.async_client() as client:
            model = (await client.models.list()).data[0].id
            body: Any = {"model": model, "prompt": "The", "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
            stream = await client.completions.create(**body, stream=True)
            await anext(aiter(stream))
            with pytest.raises(RateLimitError, match="1 requests are open already"):
                await client.completions.create(**body)
            await stream.close()

    asyncio.run(overload())
