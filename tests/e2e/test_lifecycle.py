"""How `serve` starts and ends, whatever ends it."""

import asyncio
import json
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from openai import AsyncOpenAI

from services.checkpoint import DEMO_MODEL
from tests.e2e.server import Server, is_alive, serving, wait_until

SLOW_SIM = ("--backend", "sim", "--sim-step-ms", "20")
"""Streams that last, on any machine."""
STREAMS, TOKENS = 64, 64


async def open_streams(client: AsyncOpenAI, count: int, tokens: int) -> list[Any]:
    """`count` running streams, each past its first token."""
    model = (await client.models.list()).data[0].id

    async def one(number: int) -> Any:
        stream = await client.completions.create(
            model=model, prompt=f"Number {number}", max_tokens=tokens, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        await anext(stream)
        return stream

    return await asyncio.gather(*(one(number) for number in range(count)))


async def usage(stream: Any) -> int:
    """Completion tokens that the rest of the stream reports."""
    counted = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]
    return counted[-1] if counted else 0


async def test_sigterm_lets_every_stream_finish_and_refuses_new_ones() -> None:
    with serving(*SLOW_SIM) as server:
        async with server.async_client() as client:
            streams = await open_streams(client, STREAMS, TOKENS)
            server.signal(signal.SIGTERM)
            wait_until(lambda: server.get("/readyz")[0] in (503, 0), "it is not ready any more")
            with pytest.raises((openai.APIStatusError, openai.APIConnectionError)):
                await open_streams(client, 1, 1)
            assert await asyncio.gather(*map(usage, streams)) == [TOKENS] * STREAMS
            assert server.wait() == 0, server.log.read_text()
            server.assert_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_idle_server_stops_on_one_signal(number: int) -> None:
    with serving(*SLOW_SIM) as server:
        server.signal(number)
        assert server.wait() == 0, server.log.read_text()
        server.assert_nothing_is_left()


async def test_second_sigterm_does_not_wait_for_streams() -> None:
    with serving(*SLOW_SIM) as server:
        async with server.async_client() as client:
            streams = await open_streams(client, 4, 2000)
            server.signal(signal.SIGTERM)
            wait_until(lambda: server.get("/readyz")[0] in (503, 0), "it is draining")
            assert server.process.poll() is None
            server.signal(signal.SIGTERM)
            assert server.wait() == 128 + signal.SIGTERM
            server.assert_nothing_is_left()
            for stream in streams:
                with pytest.raises((openai.APIError, httpx.HTTPError)):
                    assert await usage(stream) == 2000


@pytest.mark.parametrize("service", ["frontend", "scheduler"])
async def test_killed_service_ends_all_and_is_named(service: str) -> None:
    with serving(*SLOW_SIM) as server:
        async with server.async_client() as client:
            await open_streams(client, 4, 2000)
            server.services[service].kill()
            assert server.wait() == 128 + signal.SIGKILL
            assert server.last_line() == f"runahead: {service} was killed by SIGKILL"
            server.assert_nothing_is_left()


def test_killed_supervisor_leaves_no_process() -> None:
    with serving(*SLOW_SIM) as server:
        server.signal(signal.SIGKILL)
        server.wait()
        wait_until(lambda: not any(map(is_alive, server.services.values())), "its services are gone")


def has_children(server: Server) -> bool:
    return len(psutil.Process(server.process.pid).children()) == 3


def frontend_speaks(server: Server) -> bool:
    assert server.process.poll() is None, server.log.read_text()
    return "frontend" in server.log.read_text()


@pytest.mark.parametrize("moment", [has_children, frontend_speaks])
def test_signal_while_loading_is_an_orderly_stop(moment: Callable[[Server], bool]) -> None:
    with serving(wait=False) as server:
        wait_until(lambda: moment(server), "it is on its way")
        children = psutil.Process(server.process.pid).children()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.log.read_text()
        assert not any(map(is_alive, children))
        assert list(server.runtime.iterdir()) == []


def without(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).unlink()


def cut(name: str) -> Callable[[Path], object]:
    def damage(directory: Path) -> None:
        content = (directory / name).read_bytes()
        (directory / name).write_bytes(content[: len(content) // 2])

    return damage


def other_architecture(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without("config.json"), ["config.json"]),
        (cut("config.json"), ["config.json"]),
        (without("model.safetensors"), ["safetensors"]),
        (cut("model.safetensors"), ["model.safetensors"]),
        (without("tokenizer.json"), ["tokenizer.json"]),
        (cut("tokenizer.json"), ["tokenizer.json"]),
        (other_architecture, ["GPT2LMHeadModel"]),
    ],
    ids=lambda value: None if isinstance(value, list) else getattr(value, "__name__", None),
)
def test_broken_model_directory_ends_with_one_line(
    tmp_path: Path, damage: Callable[[Path], object], words: list[str]
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, directory)
    damage(directory)
    with serving(str(directory), wait=False) as server:
        assert server.wait() not in (0, None)
        assert server.last_line().startswith("runahead: "), server.log.read_text()
        assert all(word in server.last_line() for word in words), server.last_line()
        assert "Traceback" not in server.log.read_text()
        assert list(server.runtime.iterdir()) == []


def test_missing_model_and_taken_port_are_told_before_anything_starts() -> None:
    with serving("/no/such/model", wait=False) as server:
        assert server.wait() == 2
        assert server.last_line().startswith("runahead: no such model directory: /no/such/model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serving("--port", str(port), wait=False) as server:
            assert server.wait() == 2
            assert server.last_line().startswith(f"runahead: cannot listen on 127.0.0.1 port {port}")


def test_open_address_without_a_key_is_warned_about_and_a_key_is_demanded() -> None:
    with serving(*SLOW_SIM, "--host", "0.0.0.0") as server:
        assert "WARNING: anyone who can reach 0.0.0.0" in server.log.read_text()
    with serving(*SLOW_SIM, "--host", "0.0.0.0", RUNAHEAD_API_KEY="sesame") as server:
        assert "WARNING" not in server.log.read_text()
        assert server.get("/v1/models")[0] == 401
        assert all("sesame" not in " ".join(service.cmdline()) for service in server.services.values())
        assert all("RUNAHEAD_API_KEY" not in service.environ() for service in server.services.values())
