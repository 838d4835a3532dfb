"""Start and end of `serve` as a user starts it: signals, killed services, broken models."""

import asyncio
import fcntl
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from services.checkpoint import DEMO_MODEL
from tests.e2e.forked import STOPPED_GRACE
from tests.e2e.server import SIM, ServeProcess, is_alive, serving, wait_until
from tests.e2e.streams import assert_nothing_is_kept, open_streams, restart

STREAMS, TOKENS = 64, 64


async def usage(stream: Any) -> int:
    """Read the rest of the stream and return its number of completion tokens."""
    counted = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]
    return counted[-1] if counted else 0


async def test_sigterm_finishes_every_stream_and_refuses_new_ones() -> None:
    with serving(*SIM, forked=False) as server:
        async with server.async_client() as client:
            streams = await open_streams(client, STREAMS, TOKENS)
            server.signal(signal.SIGTERM)
            wait_until(lambda: server.get("/readyz")[0] in (503, 0), "the server is not ready")
            with pytest.raises((openai.APIStatusError, openai.APIConnectionError)):
                await open_streams(client, 1, 1)
            assert await asyncio.gather(*map(usage, streams)) == [TOKENS] * STREAMS
            assert server.wait() == 0, server.log.read_text()
            server.assert_nothing_is_left()


async def frontend_is_replaced(server: ServeProcess, number: int) -> None:
    """Send it a signal while streams are open: they break, and the next frontend answers at the same address."""
    before, others = server.services["frontend"], [server.services[name] for name in ("scheduler", "worker")]
    async with server.async_client() as client:
        streams = await open_streams(client, 4)
        before.send_signal(number)
        for stream in streams:
            with pytest.raises((openai.APIError, httpx.HTTPError)):
                await usage(stream)
    wait_until(lambda: server.get("/readyz")[0] == 200, "the next frontend is ready")
    server.find_services()
    assert server.services["frontend"] != before
    async with server.async_client() as client:
        (stream,) = await open_streams(client, 1, 5)
        assert await usage(stream) == 5
    assert_nothing_is_kept(server)
    assert [server.services[name] for name in ("scheduler", "worker")] == others


async def test_a_killed_frontend_is_replaced_until_it_dies_too_often() -> None:
    """Too often within a time that no restart exceeds."""
    with serving(*SIM, patch="from services.cli import child_process; child_process.RESTART_WINDOW = 1e6") as server:
        await frontend_is_replaced(server, signal.SIGKILL)
        assert "frontend was killed by SIGKILL; restarting" in server.log.read_text()
        for _ in range(2):
            await restart(server, "frontend")
        server.services["frontend"].kill()
        assert server.wait() == 128 + signal.SIGKILL
        assert server.last_line() == "runahead: frontend was killed by SIGKILL"
        server.assert_nothing_is_left()


async def test_a_frontend_that_was_stopped_for_long_is_replaced() -> None:
    with serving(*SIM, **{STOPPED_GRACE: "0.5"}) as server:
        await frontend_is_replaced(server, signal.SIGSTOP)
        assert "frontend was stopped for 0.5 s and is killed" in server.log.read_text()


def has_children(server: ServeProcess) -> bool:
    return len(psutil.Process(server.process.pid).children()) == 3


def frontend_has_logged(server: ServeProcess) -> bool:
    assert server.process.poll() is None, server.log.read_text()
    return "frontend" in server.log.read_text()


LOAD_HELD = """
import fcntl, os
from services.worker.backends.native.runner import NativeRunner
load = NativeRunner.load
def held(*arguments):
    with open(os.environ["LOAD_HELD"]) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    return load(*arguments)
NativeRunner.load = held
"""
"""The worker does not load before the file is unlocked."""


@pytest.mark.parametrize("moment", [has_children, frontend_has_logged])
def test_signal_while_loading_is_an_orderly_stop(tmp_path: Path, moment: Callable[[ServeProcess], bool]) -> None:
    lock = tmp_path / "lock"
    with lock.open("w") as held, serving(wait=False, patch=LOAD_HELD, LOAD_HELD=str(lock)) as server:
        fcntl.flock(held, fcntl.LOCK_EX)
        wait_until(lambda: moment(server), "the server is loading")
        children = psutil.Process(server.process.pid).children()
        server.signal(signal.SIGTERM)
        fcntl.flock(held, fcntl.LOCK_UN)
        assert server.wait() == 0, server.log.read_text()
        assert server.process.stdout.read() == b"", "it was ready"
        assert not any(map(is_alive, children))
        assert list(server.runtime.iterdir()) == []


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_truncated_model_file_is_one_line_and_a_failure(tmp_path: Path, name: str) -> None:
    """Other damages are tested with each service: test_bad_checkpoints.py, test_tokenizer.py."""
    directory = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, directory)
    content = (directory / name).read_bytes()
    (directory / name).write_bytes(content[: len(content) // 2])
    with serving(str(directory), wait=False) as server:
        assert server.wait() not in (0, None)
        assert server.last_line().startswith("runahead: "), server.log.read_text()
        assert name in server.last_line()
        assert "Traceback" not in server.log.read_text()
        assert list(server.runtime.iterdir()) == []


def test_public_address_warns_without_a_key_and_requires_a_given_key() -> None:
    """Both idle servers stop on one signal."""
    with serving(*SIM, "--host", "0.0.0.0") as server:
        assert "WARNING: anyone who can reach 0.0.0.0" in server.log.read_text()
        server.stop()
    with serving(*SIM, "--host", "0.0.0.0", RUNAHEAD_API_KEY="sesame", forked=False) as server:
        assert "WARNING" not in server.log.read_text()
        assert server.get("/v1/models")[0] == 401
        assert all("sesame" not in " ".join(service.cmdline()) for service in server.services.values())
        assert all("RUNAHEAD_API_KEY" not in service.environ() for service in server.services.values())
        server.stop(signal.SIGINT)


def test_a_runtime_directory_that_cannot_be_written_is_one_line() -> None:
    """No directory can be made in /proc, by no user."""
    with serving(wait=False, forked=False, XDG_RUNTIME_DIR="/proc", TMPDIR="/proc") as server:
        assert server.wait() == 2
        lines = server.log.read_text().splitlines()
        assert len(lines) == 1, lines
        assert "/proc cannot hold the sockets of the services: No such file or directory" in lines[0]
