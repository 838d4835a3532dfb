"""Faults of workers, schedulers and frontends that no signal from outside explains, and clients that leave."""

import asyncio
import json
import os
import random
import signal
import socket
import struct
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import APIConnectionError

from tests.e2e.second_frontend import second_frontend
from tests.e2e.server import serving, wait_until
from tests.e2e.streams import (
    answers,
    assert_no_file_is_left,
    assert_nothing_is_kept,
    num_files,
    open_streams,
    requests_total,
    restart,
)
from tests.examples.install import register

SIM = ("--backend", "sim", "--sim-step-ms", "20", "--scheduler-timeout-seconds", "2")
SHORT_GRACE = "from services.worker import result_sender; result_sender.ABORT_GRACE = 2.0"
"""A worker whose step never ends exits sooner."""
FAULTY = 7
"""Token of the prompt that makes the fault."""
POLICY = f'''
from pathlib import Path
from services.scheduler.policies import ChunkedPolicy

class SpinningPolicy(ChunkedPolicy):
    """Never return from the first admission of a certain prompt."""

    def admit(self, view, request, hit, count):
        spun = Path(__file__).with_suffix(".spun")
        if {FAULTY} in request.token_ids[: request.num_prompt_tokens].tolist() and not spun.exists():
            spun.touch()
            while True:
                pass
        return super().admit(view, request, hit, count)
'''


async def test_streams_continue_when_a_worker_dies_in_native_code(undisturbed_sim: list[Any]) -> None:
    with serving(*SIM) as server:
        async with server.async_client() as client:
            segfault = partial(restart, server, "worker", number=signal.SIGSEGV)
            assert await answers(client, segfault) == undisturbed_sim
            assert server.metric("epochs_lost_total") == 1
            assert "worker was killed by SIGSEGV; restarting" in server.log.read_text()
            assert_nothing_is_kept(server)


@pytest.mark.parametrize(
    ("fault", "end"),
    [
        ("hang", "worker exited with status 7"),
        pytest.param("freeze", "worker hung and ended itself", marks=pytest.mark.soak),
    ],
)
async def test_streams_continue_when_a_step_never_ends(undisturbed_sim: list[Any], fault: str, end: str) -> None:
    """In the thread that computes, and with the interpreter's lock, so that heartbeats end too. The worker is
    replaced; the client of the request that did it has left by then."""
    arguments = ("--sim-fault-token", str(FAULTY), "--sim-fault", fault, "--step-timeout-seconds", "1")
    with serving(*SIM, *arguments, patch=SHORT_GRACE) as server:
        async with server.async_client() as client:
            model = (await client.models.list()).data[0].id

            async def disturb() -> None:
                faulty = asyncio.create_task(client.completions.create(model=model, prompt=[100, FAULTY, 300]))
                hangs = lambda: f"has token {FAULTY}" in server.log.read_text()  # noqa: E731
                await asyncio.to_thread(wait_until, hangs, "its step has begun")
                faulty.cancel()
                await asyncio.to_thread(
                    wait_until, lambda: server.metric("epochs_lost_total") == 1, "the loss is noticed"
                )

            assert await answers(client, disturb) == undisturbed_sim
            assert end in server.log.read_text()
            assert server.metric("epochs_lost_total") == 1
            assert_nothing_is_kept(server)


async def test_streams_continue_when_the_scheduler_never_returns_from_a_loop(
    undisturbed_sim: list[Any], tmp_path: Path
) -> None:
    """It lives and is not stopped. The request that did it is answered by the next scheduler."""
    (tmp_path / "spinning_policy.py").write_text(POLICY)
    register(tmp_path, "spinning", {"runahead.policies": {"spinning": "spinning_policy:SpinningPolicy"}})
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with serving(*SIM, "--batching-policy", "spinning", PYTHONPATH=path) as server:
        async with server.async_client() as client:
            model = (await client.models.list()).data[0].id

            async def disturb() -> None:
                answer = await client.completions.create(
                    model=model, prompt=[100, FAULTY, 300], max_tokens=3, temperature=0
                )
                assert answer.usage.completion_tokens == 3

            assert await answers(client, disturb) == undisturbed_sim
            log = server.log.read_text()
            assert "scheduler hung and ended itself" in log
            assert "in admit" in log, "the stack says where"
            assert_nothing_is_kept(server)


async def test_a_killed_frontend_leaves_the_streams_of_another_one(undisturbed_sim: list[Any]) -> None:
    """Its requests end, and their KV blocks are free."""
    with serving(*SIM) as server:
        async with second_frontend(server) as other, server.async_client() as client, other.async_client() as doomed:
            streams = await open_streams(doomed, 8)
            assert await answers(client, other.kill) == undisturbed_sim
            for stream in streams:
                with pytest.raises(APIConnectionError):
                    async for _ in stream:
                        pass
            await asyncio.to_thread(assert_nothing_is_kept, server)


async def test_clients_that_leave_at_random_moments_leave_nothing() -> None:
    """With and without a reset of the connection, before the answer, in the middle of a stream, without a stream."""
    rng = random.Random(1)
    with serving(*SIM) as server:
        host, port = server.url.removeprefix("http://").split(":")

        async def leave(number: int, seconds: float, resets: bool, streams: bool) -> None:
            body = json.dumps(
                {"prompt": f"Number {number}", "max_tokens": 2000, "stream": streams, "ignore_eos": True}
            ).encode()
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(body), body)
            )
            await writer.drain()
            await asyncio.sleep(seconds)
            if resets:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.close()

        await leave(100, 0.5, False, True)
        await asyncio.to_thread(assert_nothing_is_kept, server)
        files = num_files(server)
        kinds = [(1.5 * rng.random(), rng.random() < 0.5, rng.random() < 0.7) for _ in range(100)]
        await asyncio.gather(*(leave(number, *kind) for number, kind in enumerate(kinds)))
        await asyncio.to_thread(assert_nothing_is_kept, server)
        await asyncio.to_thread(assert_no_file_is_left, server, files)
        totals = requests_total(server)
        assert set(totals) == {"aborted"}
        assert 10 < totals["aborted"] <= 101, "some left before their request was read"
