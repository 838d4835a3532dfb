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
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

import aiohttp
import numpy as np

from services.cli.bench.load import LoadClient, SentRequest
from tests.benchmarks.support.report import report
from tests.e2e.server import serving

SEATS, STEP_MS, OUTPUT = 4, 20.0, 32
MOST = SEATS / (OUTPUT * STEP_MS / 1000)
"""Requests per second if no seat is ever free."""
BASE, PROMPT = 0.9, 64
"""Share of the capacity that counts as a load of 1, and tokens of a prompt."""
UNLIMITED = 1 << 20
"""Requests that the client may have open."""


@contextlib.asynccontextmanager
async def opened(url: str, model: str) -> AsyncIterator[LoadClient]:
    body: dict[str, object] = {"model": model, "max_tokens": OUTPUT, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield LoadClient(session, body, UNLIMITED)


def requests(seed: int) -> Iterator[SentRequest]:
    """Yield requests with different prompts."""
    rng = np.random.default_rng(seed)
    while True:
        yield SentRequest(rng.integers(300, 1000, PROMPT).tolist())


async def load(url: str, model: str, rate: float, seconds: float) -> list[SentRequest]:
    sent, rng = list[SentRequest](), np.random.default_rng(0)
    async with opened(url, model) as client, asyncio.TaskGroup() as tasks:
        began = due = time.perf_counter()
        for request in requests(seed=0):
            if due >= began + seconds:
                break
            sent.append(request)
            tasks.create_task(client.send(request))
            due += float(rng.exponential(1 / rate))
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
    return sent


async def saturated_rate(url: str, model: str, seconds: float) -> float:
    """Return the requests per second that end while one always waits for a seat."""
    served, prompts = 0, requests(seed=1)
    began = time.perf_counter()

    async def ask_in_turn(client: LoadClient) -> None:
        nonlocal served
        while time.perf_counter() < began + seconds:
            await client.send(request := next(prompts))
            served += not request.error
            if request.error:
                await asyncio.sleep(0.05)

    async with opened(url, model) as client:
        await asyncio.gather(*(ask_in_turn(client) for _ in range(SEATS + 1)))
    return served / (time.perf_counter() - began)


def measure(url: str, model: str, factor: float, seconds: float, capacity: float) -> dict[str, float]:
    began = time.perf_counter()
    sent = asyncio.run(load(url, model, factor * MOST, seconds))
    took = time.perf_counter() - began
    first_tokens = [request.arrivals[0] - request.started for request in sent if not request.error]
    refused = [request for request in sent if request.error.startswith("HTTP 429")]
    other = sum(request.error.startswith("HTTP ") for request in sent) - len(refused)
    percentiles = {"p50": 50, "p99": 99}
    figures = {f"first_token_{n}_s": float(np.percentile(first_tokens, p)) for n, p in percentiles.items()}
    if refused:
        waits = [1e3 * (request.ended - request.started) for request in refused]
        figures |= {f"refusal_{n}_ms": float(np.percentile(waits, p)) for n, p in percentiles.items()}
    return figures | {
        "served": len(first_tokens),
        "refused": len(refused),
        "unanswered": len(sent) - len(first_tokens) - len(refused) - other,
        "other": other,
        "goodput": len(first_tokens) / took / capacity,
    }


def main(parser: argparse.ArgumentParser) -> None:
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
