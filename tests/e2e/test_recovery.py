"""`serve` whose scheduler is killed, stopped or gives up: no stream loses or repeats a token, and each one ends."""

import asyncio
import json
import random
import signal
from typing import Any

import pytest
from openai import APIError

from tests.e2e.forked import STOPPED_GRACE
from tests.e2e.server import NATIVE, SIM, ServeProcess, serving, wait_until
from tests.e2e.streams import (
    TOOL,
    answers,
    assert_no_file_is_left,
    assert_nothing_is_kept,
    bodies,
    num_choices,
    num_files,
    open_streams,
    requests_total,
    restart,
)

SILENCE = 2.0
"""Seconds after which frontends and workers turn away from a silent scheduler."""
DRAFTS = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
DRAFTING = (*NATIVE, "--speculative-config", DRAFTS)


@pytest.mark.parametrize(
    ("layout", "loads"),
    [
        pytest.param((*SIM, "--speculative-config", DRAFTS), 0, id="simulated", marks=pytest.mark.soak),
        pytest.param(DRAFTING, 1, id="demo model"),
    ],
)
async def test_streams_continue_with_the_next_scheduler(layout: tuple[str, ...], loads: int) -> None:
    """Kill it twice. Workers keep their weights, and requests that arrive meanwhile wait."""
    with serving(*layout) as server:
        async with server.async_client() as client:
            undisturbed = await answers(client)
        assert_nothing_is_kept(server)
        files = num_files(server)
        async with server.async_client() as client:
            model = (await client.models.list()).data[0].id
            for _ in range(2):
                late: list[Any] = []

                async def kill(late: list[Any] = late) -> None:
                    await restart(server, "scheduler")
                    late.append(
                        await client.completions.create(model=model, prompt="Late", max_tokens=3, temperature=0)
                    )

                assert await answers(client, kill) == undisturbed
                assert late[0].usage.completion_tokens == 3
            assert server.metric("weight_loads") == loads
            assert server.metric("requests_resubmitted_total") >= num_choices()
            assert "scheduler was killed by SIGKILL; restarting" in server.log.read_text()
        assert_nothing_is_kept(server)
        assert requests_total(server) == {"completed": 3 * len(bodies()) + 2}
        server.find_services()
        assert_no_file_is_left(server, files)
        server.stop()


async def stream_with_a_kill(server: ServeProcess, service: str | None, length: int = 200) -> str:
    """Return the first characters of a stream with 300 tokens of prompt. The service is killed in the middle of it: the
    stream would go on for much longer than this process may be late."""
    async with server.async_client() as client:
        model, parts = (await client.models.list()).data[0].id, list[str]()
        async with await client.completions.create(
            model=model,
            prompt=[300 + i % 100 for i in range(300)],
            max_tokens=1000,
            stream=True,
            temperature=0,
            extra_body={"ignore_eos": True},
        ) as stream:
            async for chunk in stream:
                parts += [choice.text for choice in chunk.choices]
                if service is not None and len(parts) >= 8:
                    server.services[service].kill()
                    service = None
                if len(text := "".join(parts)) >= length:
                    return text[:length]
    raise AssertionError("the stream has ended")


def recomputed(server: ServeProcess) -> float:
    """Return the number of tokens that no prefix was found for, of all requests that entered a slot."""
    return server.metric("prefix_cache_queries_total") - server.metric("prefix_cache_hits_total")


@pytest.mark.parametrize(
    ("layout", "services"),
    [
        pytest.param(SIM, ["worker"], marks=pytest.mark.soak),
        ((*SIM, "--tensor-parallel-size", "2"), ["worker-1"]),
        ((*SIM, "--pipeline-parallel-size", "2"), ["worker-0"]),
        (DRAFTING, ["worker", "scheduler"]),
    ],
)
async def test_the_next_process_finds_the_blocks_of_the_one_before(
    layout: tuple[str, ...], services: list[str]
) -> None:
    """Only the last block and the steps in flight are computed again."""
    with serving(*layout) as server:
        undisturbed = await stream_with_a_kill(server, None)
        for number, service in enumerate(services, 1):
            before = recomputed(server)
            assert await stream_with_a_kill(server, service) == undisturbed
            adopted = lambda count=number: server.log.read_text().count("KV blocks are adopted") == count  # noqa: E731
            wait_until(adopted, "the next process has the blocks")
            if service == "scheduler":
                before = 0  # its counters begin anew
            in_flight = 3 * (1 + json.loads(DRAFTS)["num_speculative_tokens"])
            assert recomputed(server) - before <= 300 % 16 + 16 + in_flight
            server.find_services()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(7))
async def test_streams_continue_when_the_scheduler_dies_at_random_moments(seed: int) -> None:
    """Three deaths per server, the most that `serve` allows within a minute: 21 moments, by the text that has come."""
    rng = random.Random(seed)
    with serving(*DRAFTING) as server:
        async with server.async_client() as client:
            left, reached = 0, asyncio.Event()

            def on_text(_: int, text: str) -> None:
                nonlocal left
                left -= len(text)
                if left <= 0:
                    reached.set()

            async def kill() -> None:
                await reached.wait()
                await restart(server, "scheduler")

            undisturbed = await answers(client, on_text=on_text)
            half = -left // 2
            for _ in range(3):
                left = rng.randint(1, half)
                reached.clear()
                assert await answers(client, kill, on_text) == undisturbed
                server.wait_readyz()
            assert server.metric("weight_loads") == 1


def num_open(server: ServeProcess) -> int:
    """Return the number of open requests."""
    found: int = json.loads(server.get("/load")[1])["server_load"]
    return found


async def test_tool_calls_and_embeddings_continue_with_the_next_scheduler() -> None:
    """The scheduler is stopped in the middle of a tool call, and killed before it reads further requests."""
    with serving(*DRAFTING) as server:
        async with server.async_client() as client:
            model = (await client.models.list()).data[0].id

            async def call(begun: asyncio.Event) -> str:
                arguments = ""
                async for chunk in await client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": "Where?"}],
                    tools=[TOOL],
                    tool_choice="required",
                    stream=True,
                    temperature=0.0,
                    max_tokens=100,
                ):
                    begun.set()
                    for tool in chunk.choices[0].delta.tool_calls or []:
                        arguments += tool.function.arguments or ""
                return arguments

            async def embed(text: str) -> list[float]:
                return (await client.embeddings.create(model=model, input=text)).data[0].embedding

            texts = [f"Text {i}" for i in range(4)]
            called, *embedded = await asyncio.gather(call(asyncio.Event()), *map(embed, texts))
            begun, scheduler = asyncio.Event(), server.services["scheduler"]
            calling = asyncio.create_task(call(begun))
            await begun.wait()
            scheduler.send_signal(signal.SIGSTOP)
            embedding = [asyncio.create_task(embed(text)) for text in texts]
            await asyncio.to_thread(wait_until, lambda: num_open(server) >= 4, "the frontend has them")
            await restart(server, "scheduler")
            assert await calling == called
            assert '"city"' in called
            for before, after in zip(embedded, await asyncio.gather(*embedding), strict=True):
                assert after == pytest.approx(before, abs=1e-5)
            assert server.metric("requests_resubmitted_total") >= 4


@pytest.mark.parametrize("service", ["scheduler", pytest.param("worker", marks=pytest.mark.soak)])
async def test_streams_end_with_an_error_when_the_server_gives_up(service: str) -> None:
    """The fourth death of a service within a minute is the last."""
    with serving(*SIM) as server:
        async with server.async_client() as client:
            streams = await open_streams(client, 4)
            for _ in range(3):
                await restart(server, service)
            server.services[service].kill()
            for stream in streams:
                with pytest.raises(APIError, match="stopped"):
                    async for _chunk in stream:
                        pass
            assert server.wait() == 128 + signal.SIGKILL
            assert server.last_line() == f"runahead: {service} was killed by SIGKILL"
            server.assert_nothing_is_left()


async def test_a_scheduler_that_was_stopped_for_long_exits_when_it_wakes(undisturbed_sim: list[Any]) -> None:
    """Meanwhile the others have turned away from it. It is restarted, and the streams continue."""
    with serving(*SIM, "--scheduler-timeout-seconds", f"{SILENCE:g}", **{STOPPED_GRACE: "60"}) as server:
        async with server.async_client() as client:

            async def stop() -> None:
                server.services["scheduler"].send_signal(signal.SIGSTOP)
                long = asyncio.create_task(asyncio.sleep(SILENCE + 0.5))
                await asyncio.to_thread(wait_until, lambda: server.get("/readyz")[0] == 503, "the frontend has noticed")
                await long
                await restart(server, "scheduler", number=signal.SIGCONT)

            assert await answers(client, stop) == undisturbed_sim
            assert "scheduler exited with status 8" in server.log.read_text()
