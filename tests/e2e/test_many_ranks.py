"""`serve` with several workers: killed ranks are replaced and no stream loses a token."""

import asyncio
import signal
from functools import partial
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.e2e.server import NATIVE, SIM, ServeProcess, is_alive, serving, wait_until
from tests.e2e.streams import answers, open_streams

TP2 = ("--tensor-parallel-size", "2", *NATIVE)


async def kill(server: ServeProcess, *victims: str) -> None:
    for victim in victims:
        server.services[victim].kill()


async def answers_with_loss_during_recovery(client: AsyncOpenAI, server: ServeProcess, ranks: list[str]) -> list[Any]:
    """Return the `answers`. All ranks are killed together, and one again right after its restart."""
    server.find_services()
    before = server.services[ranks[0]]
    restarts = server.log.read_text().count(f"{ranks[0]} was killed by SIGKILL; restarting")

    async def kill_restarted() -> None:
        while server.services[ranks[0]] == before:
            await asyncio.sleep(0.02)
            server.find_services()
        server.services[ranks[0]].kill()

    texts, _ = await asyncio.gather(answers(client, partial(kill, server, *ranks)), kill_restarted())
    line = f"{ranks[0]} was killed by SIGKILL; restarting"
    wait_until(lambda: server.log.read_text().count(line) == restarts + 2, "it was restarted twice")
    return texts


@pytest.mark.parametrize(
    ("layout", "victims"),
    [
        (TP2, ["worker-1"]),
        pytest.param(TP2, ["worker-1", "worker-0"], marks=pytest.mark.soak),
        (("--pipeline-parallel-size", "2", "--batching-policy", "balanced", *SIM), ["worker-0", "worker-1"]),
    ],
    ids=["tensor parallel", "tensor parallel, one after the other", "pipeline stages"],
)
async def test_killed_workers_are_restarted_and_streams_continue(
    layout: tuple[str, ...], victims: list[str], undisturbed_sim: list[Any]
) -> None:
    with serving(*layout) as server:
        async with server.async_client() as client:
            undisturbed = undisturbed_sim if "sim" in layout else await answers(client)
            for count, victim in enumerate(victims, start=1):
                server.find_services()
                assert await answers(client, partial(kill, server, victim)) == undisturbed
                # On a busy machine the streams may have ended before the kill, and the epoch ends later
                wait_until(lambda epoch=count + 1: server.metric("epoch") == epoch, "the next epoch")  # type: ignore[misc]
            assert f"{victims[0]} was killed by SIGKILL; restarting" in server.log.read_text()
            ranks = ["worker-0", "worker-1"]
            assert await answers_with_loss_during_recovery(client, server, ranks) == undisturbed
            server.find_services()
            server.stop()


@pytest.mark.parametrize(
    "ranks",
    [("--tensor-parallel-size", "2", *SIM), pytest.param(TP2, marks=pytest.mark.soak)],
    ids=["simulated", "native"],
)
async def test_services_do_not_outlive_a_killed_supervisor(ranks: tuple[str, ...]) -> None:
    with serving(*ranks) as server:
        async with server.async_client() as client:
            streams = await open_streams(client, 4)
            server.signal(signal.SIGKILL)
            server.wait()
            for stream in streams:
                await stream.close()
        wait_until(lambda: not any(map(is_alive, server.services.values())), "all ranks have ended")
