"""Soaks of `serve`: the truth of its probes, and random faults for a long time."""

import asyncio
import contextlib
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import httpx
import psutil
from openai import APIError

from tests.e2e.second_frontend import SecondFrontend, second_frontend
from tests.e2e.server import ServeProcess, is_alive, serving
from tests.soak.load import Load, bodies

LAYOUT = ("--backend", "sim", "--sim-step-ms", "20", "--scheduler-timeout-seconds", "3")
LONG = (
    "--sim-prefill-token-us", "2000", "--max-num-batched-tokens", "512", "--no-enable-prefix-caching",
)  # fmt: skip
"""Settings with which a prompt delays each step by a second, also when the same one comes again."""
DRAFTS = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
GROUPS: dict[str, tuple[str, ...]] = {
    "one rank": (),
    "TP 2, drafts": ("--tensor-parallel-size", "2", "--speculative-config", DRAFTS),
    "PP 2": ("--pipeline-parallel-size", "2"),
}
"""Groups of workers that faults strike in turn."""
FAULTS_PIECE = 600
"""Seconds of faults for each of `GROUPS`."""
STREAMS, TOKENS = 24, 60
PAUSE = 24.0
"""Mean seconds between two faults. `serve` restarts a service three times within a minute."""
LEAST_PAUSE = 21.0
PROBE_INTERVAL = 0.1
DETECTION = {"killed": 1.5, "stopped": 12.0}
"""Seconds within which the probe must say that the engine does not serve."""
FAULTS = (*product(DETECTION, ("scheduler", "worker")), ("killed", "frontend"))
"""Kinds of faults and their services. The frontend is another one than that of the streams."""
DOOMED: dict[str, Any] = {
    "prompt": "Doomed", "n": 4, "max_tokens": 2000, "stream": True, "extra_body": {"ignore_eos": True},
}  # fmt: skip
"""Request to a frontend that is killed; as many as make the choices of all other streams fewer than theirs."""
PROBES = 50
"""Probes within which the scheduler must have freed the requests of a killed frontend, and a metric says so."""
SETTLE = 30.0
"""Seconds of faults before memory and files are measured first."""
MEMORY_SHARE, MEMORY_BYTES = 0.05, 24 << 20
"""Growth of the frontend's memory that is no leak."""
LOG_CHARACTERS = 20_000
"""End of the server's log that is kept with a failure."""


@dataclass
class Probes:
    """States of `/readyz` and `/livez`, as changes."""

    url: str
    changes: list[tuple[float, int]] = field(default_factory=list)
    """Monotonic seconds and the status of /readyz from then on."""
    not_alive: int = 0
    """Probes of /livez that did not return 200."""

    async def run(self, until: float) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=5.0, verify=False) as client:
            while time.monotonic() < until:
                ready = await client.get("/readyz")
                self.not_alive += (await client.get("/livez")).status_code != 200
                if not self.changes or self.changes[-1][1] != ready.status_code:
                    self.changes.append((time.monotonic(), ready.status_code))
                await asyncio.sleep(PROBE_INTERVAL)

    def first(self, status: int, since: float) -> float | None:
        """Return when the probe first had a status after a moment; monotonic seconds."""
        return next((at for at, found in self.changes if found == status and at >= since), None)

    def at(self, moment: float) -> int:
        """Return the status at a moment."""
        return next((status for at, status in reversed(self.changes) if at <= moment), 0)


async def long_prompts(seconds: float, seed: int) -> tuple[Counter[str], list[str]]:
    """Run streams of long prompts without any fault. Return what has happened; a probe that fails is wrong."""
    with serving(*LAYOUT, *LONG) as server:
        async with server.async_client() as client:
            load, probes = Load(client, bodies(8, 8)), Probes(server.url)
            for body in load.bodies:
                body["prompt"] = [300 + (seed + i) % 500 for i in range(400)]
            await load.learn()
            until = time.monotonic() + seconds
            streams = (load.stream(index, until) for index in range(len(load.bodies)))
            await asyncio.gather(*streams, probes.run(until))
        changes = [status for _, status in probes.changes]
        alarms = [] if changes == [200] and not probes.not_alive else [f"false alarms: {changes}"]
        return load.counts, with_log(load.failures + alarms, server)


async def random_faults(seconds: float, seed: int) -> tuple[Counter[str], list[str]]:
    """Run streams and faults for some time. Return what has happened, and what is wrong. `seed`: seconds before."""
    rng, happened = random.Random(seed), Counter[str]()
    faults: list[tuple[str, str]] = []
    """The next faults. Each comes once before one comes again, so that a piece has all of them."""
    group = list(GROUPS)[seed // FAULTS_PIECE % len(GROUPS)]
    with serving(*LAYOUT, *GROUPS[group]) as server:
        async with server.async_client() as client, second_frontend(server) as other:
            load, probes = Load(client, bodies(STREAMS, TOKENS)), Probes(server.url)
            await load.learn()
            until = time.monotonic() + seconds
            measured: list[tuple[int, int]] = []
            began = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                for index in range(STREAMS):
                    tasks.create_task(load.stream(index, until))
                tasks.create_task(probes.run(until))
                while (left := until - time.monotonic()) > LEAST_PAUSE:
                    pause = max(LEAST_PAUSE, rng.expovariate(1 / PAUSE))
                    await asyncio.sleep(min(pause, left))
                    if until - time.monotonic() > LEAST_PAUSE:
                        if not faults:
                            faults = rng.sample(FAULTS, len(FAULTS))
                        kind, name = faults.pop()
                        happened[f"{group}: {name} {kind}"] += 1
                        load.failures += await (
                            kill_frontend(other, server, load, probes)
                            if name == "frontend"
                            else strike(server, load, probes, kind, name, rng)
                        )
                    if time.monotonic() - began > SETTLE:
                        measured.append(memory_and_files(server))
        failures = load.failures + leaks(measured)
        failures += [f"{probes.not_alive} probes of /livez failed"] if probes.not_alive else []
        happened.update(load.counts)
        for name in ("num_requests_running", "num_requests_waiting"):
            if server.metric(name):
                failures.append(f"{name} is {server.metric(name)} at the end")
        return happened, with_log(failures, server)


def with_log(failures: list[str], server: ServeProcess) -> list[str]:
    """Add the end of the server's log to what is wrong."""
    return [*failures, f"log of the server:\n{server.log.read_text()[-LOG_CHARACTERS:]}"] if failures else []


async def strike(
    server: ServeProcess, load: Load, probes: Probes, kind: str, name: str, rng: random.Random
) -> list[str]:
    """Kill or stop a service, of several workers any one, and compare the probe with what streams get. Return what is
    wrong."""
    server.find_services()
    running = [p for service, p in server.services.items() if service.startswith(name) and is_alive(p)]
    wrong, at, process = [], time.monotonic(), rng.choice(running) if running else None
    if probes.at(at) != 200:
        wrong.append(f"/readyz is {probes.at(at)} although no fault was made")
    if process is None:
        return [*wrong, f"no {name} runs although no fault was made"]
    process.send_signal(signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
    await asyncio.sleep(LEAST_PAUSE - 3.0)
    noticed, first = probes.first(503, at), probes.first(200, at + 0.2)
    if noticed is None or noticed - at > DETECTION[kind]:
        wrong.append(f"{name} {kind}: /readyz said 503 after {None if noticed is None else noticed - at} s")
    elif probes.at(time.monotonic()) != 200:
        wrong.append(f"{name} {kind}: /readyz says {probes.at(time.monotonic())} after {LEAST_PAUSE - 3.0:g} s")
    elif first is not None and time.monotonic() - load.last_token > 5.0:
        wrong.append(f"{name} {kind}: /readyz says 200, but no token has come for 5 s")
    return wrong


async def kill_frontend(other: SecondFrontend, server: ServeProcess, load: Load, probes: Probes) -> list[str]:
    """Kill a frontend with open streams and start it again. Return what is wrong."""
    most, wrong, at = sum(body.get("n", 1) for body in load.bodies), list[str](), time.monotonic()
    async with other.async_client() as client:
        create = client.completions.create
        doomed = [await create(model=load.model, **DOOMED) for _ in range(most // DOOMED["n"] + 1)]
        for stream in doomed:
            await anext(stream)
        if not await comes_true(lambda: num_requests(server) > most):
            wrong.append(f"{num_requests(server):g} requests are open before a frontend is killed")
        await other.kill()
        for stream in doomed:
            with contextlib.suppress(APIError):
                async for _ in stream:
                    pass
                wrong.append("a stream of a killed frontend has ended in order")
    if not await comes_true(lambda: num_requests(server) <= most):
        wrong.append(f"{num_requests(server):g} requests are open, although others than a killed frontend have {most}")
    await other.start()
    async with other.async_client() as client:
        again = Load(client, load.bodies, model=load.model)
        answers = await asyncio.gather(*map(again.ask, range(len(again.bodies))))
    wrong += [
        f"frontend started again, request {index}: {answer}, not {load.expected[index]}"
        for index, answer in enumerate(answers)
        if answer != load.expected[index]
    ]
    if probes.at(at) != 200 or probes.first(503, at) is not None:
        wrong.append("/readyz of another frontend was not 200 all the time")
    return wrong


def num_requests(server: ServeProcess) -> float:
    """Return the number of requests that the scheduler has, as the frontend was told last."""
    return server.metric("num_requests_running") + server.metric("num_requests_waiting")


async def comes_true(condition: Callable[[], bool]) -> bool:
    """Return whether the condition becomes true within `PROBES` probes."""
    for _ in range(PROBES):
        if await asyncio.to_thread(condition):
            return True
        await asyncio.sleep(PROBE_INTERVAL)
    return False


def memory_and_files(server: ServeProcess) -> tuple[int, int]:
    """Return the frontend's resident memory in bytes, and its number of open files: it is never replaced."""
    frontend: psutil.Process = server.services["frontend"]
    return frontend.memory_info().rss, frontend.num_fds()


def leaks(measured: list[tuple[int, int]]) -> list[str]:
    """Compare the last quarter of the measurements with the first."""
    quarter = len(measured) // 4
    if not quarter:
        return []
    wrong = []
    (before, files_before), (after, files_after) = (
        tuple(sum(column) // quarter for column in zip(*part, strict=True))
        for part in (measured[:quarter], measured[-quarter:])
    )
    if after - before > max(MEMORY_BYTES, MEMORY_SHARE * before):
        wrong.append(f"the frontend's memory has grown from {before} to {after} bytes")
    if files_after > files_before + 5:
        wrong.append(f"the frontend's open files have grown from {files_before} to {files_after}")
    return wrong
