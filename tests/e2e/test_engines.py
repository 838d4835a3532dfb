"""Several engines behind one frontend: streams move when an engine is lost or drains, and no token differs."""

import asyncio
import json
import signal
import subprocess
import sys
from typing import Any

import pytest

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


@pytest.mark.parametrize("layout", [SIM, NATIVE], ids=["simulated", "demo model"])
async def test_streams_move_when_an_engine_is_killed(layout: tuple[str, ...]) -> None:
    with serving(*layout, *TWO) as server:
        async with server.async_client() as client:
            undisturbed = await answers(client)
            for name in ("0", "1"):
                assert await answers(client, lambda name=name: kill_engine(server, name)) == undisturbed
        assert server.metric("stream_moves_total") >= 10
        assert requests_total(server) == {"completed": 3 * len(bodies())}
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
