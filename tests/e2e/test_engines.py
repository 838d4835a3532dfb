"""Several engines behind one frontend: streams move when an engine is lost or drains, and no token differs."""

import asyncio
import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from services.checkpoint import DEMO_MODEL
from tests.e2e.server import ServeProcess, serving, wait_until
from tests.e2e.streams import answers, assert_nothing_is_kept, bodies, requests_total

SIM = ("--backend", "sim", "--sim-step-ms", "20")
NATIVE = ("--threads", "1", "--kv-cache-memory-bytes", str(64 << 20))
TWO = ("--data-parallel-size", "2")


async def kill_engine(server: ServeProcess, name: str) -> None:
    """Kill the scheduler and the worker of an engine, and wait until the supervisor has started others."""
    services = [f"scheduler-{name}", f"worker-{name}"]
    before = [server.services[service] for service in services]
    for process in before:
        process.send_signal(signal.SIGKILL)
    while any(server.services[s] == b for s, b in zip(services, before, strict=True)):
        await asyncio.sleep(0.02)
        server.find_services()


CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 40}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "find_city", "parameters": CITY}}
OTHER_KINDS = 40


async def other_answers(client: AsyncOpenAI) -> list[Any]:
    """Return answers that are no streams of completions: tool calls, responses, embeddings, prompts' log-probabilities
    and stop strings."""
    model = (await client.models.list()).data[0].id

    async def call(i: int) -> Any:
        messages: Any = [{"role": "user", "content": f"Where is {i}?"}]
        done = await client.chat.completions.create(
            model=model,
            messages=messages,
            tools=[TOOL],
            tool_choice="required",
            temperature=0.0,
            max_tokens=80,
        )
        return [call.function.arguments for call in done.choices[0].message.tool_calls or []]  # type: ignore[union-attr]

    async def respond(i: int) -> Any:
        first = await client.responses.create(
            model=model, input=f"Number {i}", temperature=0.0, max_output_tokens=40
        )
        more = await client.responses.create(
            model=model, input="And?", previous_response_id=first.id, temperature=0.0, max_output_tokens=40
        )
        return first.output_text, more.output_text

    async def embed(i: int) -> Any:
        found = (await client.embeddings.create(model=model, input=[f"Text {i}", f"Text {i + 1}"])).data
        return [round(value, 4) for entry in found for value in entry.embedding]

    async def score(i: int) -> Any:
        done = await client.completions.create(
            model=model, prompt=f"Number {i} is", max_tokens=60, temperature=1.0, seed=i, stop=["qq"],
            extra_body={"prompt_logprobs": 1},
        )  # fmt: skip
        return done.choices[0].text, done.choices[0].model_extra

    kinds = (call, respond, embed, score)
    return await asyncio.gather(*(kinds[i % len(kinds)](i) for i in range(OTHER_KINDS)))


async def test_streams_move_when_an_engine_is_killed() -> None:
    """Kill each of two engines, under streams of every kind."""
    with serving(*NATIVE, *TWO) as server:
        wait_until(lambda: server.metric("engine_ready") == 2, "both engines serve")
        async with server.async_client() as client:
            undisturbed = await asyncio.gather(answers(client), other_answers(client))
            for name in ("0", "1"):
                disturbed = answers(client, lambda name=name: kill_engine(server, name))
                assert await asyncio.gather(disturbed, other_answers(client)) == undisturbed
        assert server.metric("stream_moves_total") >= 10
        assert requests_total(server) == {"completed": 3 * (len(bodies()) + OTHER_KINDS + OTHER_KINDS // 4)}
        assert_nothing_is_kept(server)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.log.read_text()
        server.assert_nothing_is_left()


ADMIN = "--enable-admin-routes"


def run_command(*arguments: str, fails: bool = False) -> str:
    """Run a command of `runahead`, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def engines_of(server: ServeProcess) -> dict[str, dict[str, Any]]:
    found = json.loads(run_command("engines", server.url, "--json"))
    return {engine["name"]: engine for engine in found}


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
async def test_streams_move_when_engines_are_killed_at_random_moments(seed: int) -> None:
    """Two deaths per server, of either engine."""
    rng = random.Random(seed)
    with serving(*(SIM if seed % 2 else NATIVE), *TWO) as server:
        wait_until(lambda: server.metric("engine_ready") == 2, "both engines serve")
        async with server.async_client() as client:
            undisturbed = await answers(client)
            for _ in range(2):

                async def kill() -> None:
                    await asyncio.sleep(3 * rng.random())
                    await kill_engine(server, rng.choice("01"))

                assert await answers(client, kill) == undisturbed
                wait_until(lambda: server.metric("engine_ready") == 2, "both engines serve")


async def test_streams_move_when_an_engine_drains() -> None:
    with serving(*SIM, *TWO, ADMIN) as server:
        async with server.async_client() as client:
            undisturbed = await answers(client)

            async def drain() -> None:
                await asyncio.to_thread(run_command, "drain", "0", server.url)
                found = engines_of(server)
                assert found["0"]["state"] == "draining"
                assert (found["0"]["streams"], found["1"]["streams"] > 0) == (0, True)

            assert await answers(client, drain) == undisturbed
        refused = run_command("drain", "1", server.url, fails=True)
        assert "the only one that serves" in refused
        run_command("drain", "0", server.url, "--cancel")
        wait_until(lambda: engines_of(server)["0"]["state"] == "ready", "it serves again")
        assert len(engines_of(server)["0"]["pids"]) == 2
        assert requests_total(server) == {"completed": 2 * len(bodies())}


async def test_streams_move_when_settings_change() -> None:
    """From one rank to two and back, to another policy, and to another depth. The old processes end."""
    with serving(*NATIVE, ADMIN) as server:
        async with server.async_client() as client:
            undisturbed = await answers(client)
            for flags in (
                ("--tensor-parallel-size", "2"),
                ("--tensor-parallel-size=1", "--batching-policy", "balanced"),
                ("--batch-queue-depth", "3"),
            ):

                async def change(flags: tuple[str, ...] = flags) -> None:
                    await asyncio.to_thread(run_command, "replan", server.url, *flags)

                assert await answers(client, change) == undisturbed
            assert list(engines_of(server)) == ["3"]
            info = json.loads(server.get("/server_info")[1])["features"]
            assert (info["batching_policy"], info["batch_queue_depth"]) == ("balanced", "3")
        assert requests_total(server) == {"completed": 4 * len(bodies())}
        server.services.clear()
        server.find_services()
        assert sorted(server.services) == ["frontend", "scheduler-3", "worker-3"]
        server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.log.read_text()
        server.assert_nothing_is_left()


def test_a_change_that_fails_leaves_the_engines_as_they_were(tmp_path: Path) -> None:
    """The tokenizer of the new engine is not that of the frontend, which is found when it is connected."""
    shutil.copytree(DEMO_MODEL, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text() + "\n")
    with serving(*SIM, ADMIN) as server:
        before = engines_of(server)["0"]
        for flags, why in (
            (("--tokenizer", str(tmp_path / "other")), "tokenizer mismatch"),
            (("--pipeline-parallel-size", "999"), "pipeline"),
            (("--port", "1"), "--port is no setting of an engine"),
            (("--frobnicate", "1"), "--frobnicate is no flag"),
        ):
            assert why in run_command("replan", server.url, *flags, fails=True)
        wait_until(lambda: list(engines_of(server)) == ["0"], "the other engine is forgotten")
        assert engines_of(server)["0"]["pids"] == before["pids"]
        with server.client() as client:
            model = client.models.list().data[0].id
            assert client.completions.create(model=model, prompt="Still", max_tokens=3).usage
