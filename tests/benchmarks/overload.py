"""Overload: first-token latency of admitted requests at the load that the server can serve and at ten times of it.

`serve` with the simulator (20 ms per step, 4 seats, outputs of 32 tokens: at most 6.25 requests per second), an open
loop with Poisson arrivals over kept connections. Reported for each load: requests that were served, refused and without
an answer, latency of first tokens and of refusals, with the delays of the client itself, and goodput as a share of the
capacity.

The capacity is measured first: one client more than there are seats, each of which sends its next request when the one
before it has ended.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import aiohttp
import numpy as np

from tests.benchmarks.support.report import report
from tests.e2e.server import serving

SEATS, STEP_MS, OUTPUT = 4, 20.0, 32
MOST = SEATS / (OUTPUT * STEP_MS / 1000)
"""Requests per second if no seat is ever free."""
BASE, PROMPT = 0.9, 64
"""Share of the capacity that counts as a load of 1, and tokens of a prompt."""


@dataclass
class LoadOutcome:
    first_tokens: list[float] = field(default_factory=list)
    """Seconds from the request to its first token, of requests that were served."""
    refusals: list[float] = field(default_factory=list)
    """Seconds from the request to its refusal."""
    unanswered: int = 0
    other: int = 0
    tokens: int = 0


async def ask(session: aiohttp.ClientSession, body: dict[str, object], outcome: LoadOutcome) -> None:
    began, first = time.perf_counter(), 0.0
    try:
        async with session.post("/v1/completions", json=body) as response:
            if response.status == 429:
                await response.read()
                outcome.refusals.append(time.perf_counter() - began)
                return
            if response.status != 200:
                outcome.other += 1
                return
            async for line in response.content:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"]:
                    first = first or time.perf_counter()
                    outcome.tokens += 1
            outcome.first_tokens.append(first - began)
    except aiohttp.ClientError:
        outcome.unanswered += 1


def bodies(model: str, rng: np.random.Generator) -> Iterator[dict[str, object]]:
    """Yield requests with different prompts."""
    body = {"model": model, "max_tokens": OUTPUT, "ignore_eos": True, "stream": True}
    while True:
        yield body | {"prompt": rng.integers(300, 1000, PROMPT).tolist()}


async def load(url: str, model: str, rate: float, seconds: float) -> LoadOutcome:
    rng, outcome = np.random.default_rng(0), LoadOutcome()
    requests = bodies(model, rng)
    async with (
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as tasks,
    ):
        began = due = time.perf_counter()
        while due < began + seconds:
            tasks.create_task(ask(session, next(requests), outcome))
            due += float(rng.exponential(1 / rate))
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
    return outcome


async def saturated_rate(url: str, model: str, seconds: float) -> float:
    """Return the requests per second that end while one always waits for a seat."""
    outcome, requests = LoadOutcome(), bodies(model, np.random.default_rng(1))
    began = time.perf_counter()

    async def client() -> None:
        while time.perf_counter() < began + seconds:
            refused = len(outcome.refusals)
            await ask(session, next(requests), outcome)
            if len(outcome.refusals) > refused:
                await asyncio.sleep(0.05)

    async with aiohttp.ClientSession(url) as session:
        await asyncio.gather(*(client() for _ in range(SEATS + 1)))
    return len(outcome.first_tokens) / (time.perf_counter() - began)


def measure(url: str, model: str, factor: float, seconds: float, capacity: float) -> dict[str, float]:
    began = time.perf_counter()
    outcome = asyncio.run(load(url, model, factor * MOST, seconds))
    took = time.perf_counter() - began
    percentiles = {"p50": 50, "p99": 99}
    figures = {f"first_token_{n}_s": float(np.percentile(outcome.first_tokens, p)) for n, p in percentiles.items()}
    if outcome.refusals:
        figures |= {f"refusal_{n}_ms": 1e3 * float(np.percentile(outcome.refusals, p)) for n, p in percentiles.items()}
    return figures | {
        "served": len(outcome.first_tokens),
        "refused": len(outcome.refusals),
        "unanswered": outcome.unanswered,
        "other": outcome.other,
        "goodput": len(outcome.first_tokens) / took / capacity,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each load")
    args = parser.parse_args()
    layout = ("--backend", "sim", "--sim-step-ms", str(STEP_MS), "--max-num-seqs", str(SEATS))
    results = {}
    with serving(*layout, "--max-queue-seconds=0.25", "--log-level", "warning") as server:
        model = server.client().models.list().data[0].id
        capacity = asyncio.run(saturated_rate(server.url, model, args.seconds / 3))
        for name, factor in {"1x": BASE, "10x": 10 * BASE, "1x again": BASE}.items():
            results[name] = measure(server.url, model, factor, args.seconds, capacity)
    ratio = results["10x"]["first_token_p99_s"] / results["1x"]["first_token_p99_s"]
    rows = [
        {"figure": figure, **{name: result.get(figure, "") for name, result in results.items()}}
        for figure in results["10x"]
    ]
    figures = {"p99 of the first token, 10x / 1x": ratio, "capacity, requests/s": capacity}
    report("overload", "overload", rows, figures, vars(args), results)


if __name__ == "__main__":
    main()
