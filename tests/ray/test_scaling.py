"""The number of engines follows the time that requests wait, and engines that are stopped lose no stream."""

import asyncio
import time
from typing import Any

from openai import AsyncOpenAI

from tests.e2e.server import wait_until
from tests.ray.cluster import OWN_PORT, Cluster, HttpFrontend, engines, serves

SLOW = ("backend=sim", "sim_step_ms=50", "max_num_seqs=2")
LONG: Any = {"prompt": "A long one", "max_tokens": 500, "temperature": 1.0, "seed": 7}


async def _long(client: AsyncOpenAI) -> str:
    model, text = (await client.models.list()).data[0].id, ""
    body = LONG | {"extra_body": {"ignore_eos": True}}
    async for chunk in await client.completions.create(model=model, stream=True, **body):
        text += chunk.choices[0].text
    return text


async def _load(client: AsyncOpenAI, stop: asyncio.Event) -> int:
    """Send requests, eight at a time, and return how many were answered."""
    model, count = (await client.models.list()).data[0].id, 0

    async def one(number: int) -> None:
        nonlocal count
        while not stop.is_set():
            await client.completions.create(
                model=model, prompt=f"{number}", max_tokens=20, extra_body={"ignore_eos": True}
            )
            count += 1

    await asyncio.gather(*map(one, range(8)))
    return count


async def until(condition: Any, what: str) -> None:
    await asyncio.to_thread(wait_until, condition, what)


async def _scale(frontend: HttpFrontend) -> tuple[str, str]:
    """Return a long answer of one engine, and the same one while three engines become one."""
    async with frontend.async_client() as client:
        reference, stop = await _long(client), asyncio.Event()
        load, began = asyncio.create_task(_load(client, stop)), time.monotonic()
        await until(serves(frontend, 3), "three engines serve")
        print(f"\nseconds from the first queue until three engines serve: {time.monotonic() - began:.0f}")
        stop.set()
        assert await load > 0
        names = set(engines(frontend))
        moved, same = await asyncio.gather(_long(client), _long(client))
        assert moved == same
        await until(lambda: len(engines(frontend)) == 1, "one engine is left")
        assert set(engines(frontend)) <= names
        return reference, moved


def test_engines_come_with_a_queue_and_go_without_one(cluster: Cluster) -> None:
    delays = ("target_queue_seconds=0.5", "upscale_delay_s=1", "downscale_delay_s=4")
    cluster.serve(*SLOW, "max_data_parallel_size=3", *delays)
    (frontend,) = cluster.frontends()
    assert frontend.url.endswith(str(OWN_PORT))
    reference, moved = asyncio.run(_scale(frontend))
    assert moved == reference
