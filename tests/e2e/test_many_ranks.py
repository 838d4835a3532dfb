"""`serve` with several workers: it looks like one, and a worker that dies costs nobody a token."""

import asyncio
import signal

import pytest
from openai import AsyncOpenAI

from tests.e2e.server import Server, is_alive, serving, wait_until

TOKENS = 96
SIM = ("--backend", "sim", "--sim-step-ms", "20")
NATIVE = ("--threads", "1", "--kv-cache-memory-bytes", str(64 << 20))


TP2 = ("--tensor-parallel-size", "2", *NATIVE)


async def answers(client: AsyncOpenAI, server: Server, *victims: str) -> list[str]:
    """The texts of eight streams; `victims` are killed at once when all have begun."""
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
        for victim in victims:
            server.services[victim].kill()

    *texts, _ = await asyncio.gather(*map(one, range(8)), kill())
    return texts


@pytest.mark.parametrize(
    ("layout", "victims"),
    [
        (TP2, ["worker-1", "worker-0"]),
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
            assert f"{victims[0]} was killed by SIGKILL; restarting" in server.log.read_text()
            server.find_services()
            server.signal(signal.SIGTERM)
            assert server.wait() == 0, server.log.read_text()
            server.assert_nothing_is_left()


async def test_all_ranks_killed_at_once_and_one_again_when_it_is_back() -> None:
    """F6: two deaths within one recovery."""
    with serving(*TP2) as server:
        async with server.async_client() as client:
            calm = await answers(client, server)
            before = server.services["worker-1"]

            async def again() -> None:
                while server.services["worker-1"] == before:
                    await asyncio.sleep(0.02)
                    server.find_services()
                server.services["worker-1"].kill()

            texts, _ = await asyncio.gather(answers(client, server, "worker-0", "worker-1"), again())
            assert texts == calm
        assert server.log.read_text().count("worker-1 was killed by SIGKILL; restarting") == 2
        server.find_services()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.log.read_text()
        server.assert_nothing_is_left()


@pytest.mark.parametrize("what", ["scheduler", "serve"])
async def test_ranks_in_the_middle_of_steps_do_not_outlive(what: str) -> None:
    with serving(*TP2) as server:
        async with server.async_client() as client:
            model = (await client.models.list()).data[0].id
            streams = [
                await client.completions.create(
                    model=model, prompt=f"Number {number} is", max_tokens=500, stream=True,
                    extra_body={"ignore_eos": True},
                )
                for number in range(4)
            ]  # fmt: skip
            for stream in streams:
                await anext(aiter(stream))
            if what == "serve":
                server.signal(signal.SIGKILL)
                server.wait()
            else:
                server.services["scheduler"].kill()
                assert server.wait() == 128 + signal.SIGKILL
                assert server.last_line() == "runahead: scheduler was killed by SIGKILL"
            for stream in streams:
                await stream.close()
        wait_until(lambda: not any(map(is_alive, server.services.values())), "no rank is left")


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
        assert "serve starts the workers and needs a number" in server.last_line()


def test_size_that_the_model_does_not_allow_is_refused_by_name() -> None:
    with serving("--tensor-parallel-size", "3", *NATIVE, wait=False) as server:
        assert server.wait() == 4
        assert "--tensor-parallel-size 3: the model can be cut into 1, 2" in server.log.read_text()
        assert server.last_line().startswith("runahead: worker-")
