"""Several engines behind one frontend: streams move when an engine is lost or drains, and no token differs."""

import asyncio
import signal

import pytest

from tests.e2e.server import ServeProcess, serving
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
