"""`serve` with several workers: it looks like one, and a worker that dies costs nobody a token."""

import asyncio
import signal

import pytest
from openai import AsyncOpenAI

from tests.e2e.server import Server, is_alive, serving, wait_until

TOKENS = 96
SIM = ("--backend", "sim", "--sim-step-ms", "20")
NATIVE = ("--threads", "1", "--kv-cache-memory-bytes", str(64 << 20))


async def answers(client: AsyncOpenAI, server: Server, victim: str = "") -> list[str]:
    """The texts of eight streams; `victim` is killed when all have begun."""
    model, begun = (await client.models.list()).data[0].id, asyncio.Barrier(9)

    async def one(number: int) -> str:
        text = ""
        stream = await client.completions.create(
            model=model, prompt=f"Number {number} is", max_tokens=TOKENS, stream=True, seed=number,
            temperature=float(number % 2), extra_body={"ignore_eos": True},
        )  # fmt: skip
        async for chunk in stream:
            if not text:
                await begun.wait()
            text += chunk.choices[0].text
        return text

    async def kill() -> None:
        await begun.wait()
        if victim:
            server.services[victim].kill()

    *texts, _ = await asyncio.gather(*map(one, range(8)), kill())
    return texts


@pytest.mark.parametrize(
    ("layout", "victims"),
    [
        (("--tensor-parallel-size", "2", *NATIVE), ["worker-1", "worker-0"]),
        (
            ("--pipeline-parallel-size", "2", "--batching-policy", "balanced", *SIM),
            ["worker-0", "worker-1"],
        ),
        (SIM, ["worker"]),
    ],
    ids=["tensor parallel", "pipeline stages", "one rank"],
)
async def test_killed_worker_is_started_again_and_streams_go_on(
    layout: tuple[str, ...], victims: list[str]
) -> None:
    with serving(*layout) as server:
        async with server.async_client() as client:
            calm = await answers(client, server)
            for count, victim in enumerate(victims, start=1):
                server.find_services()
                assert await answers(client, server, victim) == calm
                assert server.metric("epoch") == count + 1
            assert f"{victims[0]} was killed by SIGKILL; it is started again" in server.log.read_text()
            server.find_services()
            server.signal(signal.SIGTERM)
            assert server.wait() == 0, server.log.read_text()
            server.assert_nothing_is_left()


async def test_worker_that_keeps_dying_ends_all_and_is_named() -> None:
    """F6: it does not spin."""
    with serving(*SIM) as server:
        for _ in range(4):
            wait_until(lambda: is_alive(server.services["worker"]), "it is back")
            server.services["worker"].kill()
            wait_until(lambda: not is_alive(server.services["worker"]), "it is dead")
            while server.process.poll() is None and not is_alive(server.services["worker"]):
                await asyncio.sleep(0.05)
                if server.process.poll() is None:
                    server.find_services()
        assert server.wait() == 128 + signal.SIGKILL
        assert server.last_line() == "runahead: worker was killed by SIGKILL"
        server.assert_nothing_is_left()


def test_auto_is_refused_where_workers_do_not_come_by_themselves() -> None:
    with serving("--tensor-parallel-size", "auto", wait=False) as server:
        assert server.wait() == 2
        assert "serve starts them and needs a number" in server.last_line()


def test_size_that_the_model_does_not_allow_is_refused_by_name() -> None:
    with serving("--tensor-parallel-size", "3", *NATIVE, wait=False) as server:
        assert server.wait() == 4
        assert "--tensor-parallel-size 3: the model can be cut into 1, 2" in server.log.read_text()
        assert server.last_line().startswith("runahead: worker-")
