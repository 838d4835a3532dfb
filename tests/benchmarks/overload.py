"""Overload: first-token latency of admitted requests at the load that the server can serve and at ten times of it.

`serve` with the simulator (20 ms per step, 4 seats, outputs of 32 tokens: 6 requests per second), an open loop with
Poisson arrivals over kept connections. Reported for each load: requests that were served, refused and without an
answer, latency of first tokens and of refusals, goodput as a share of the capacity, and the resident memory of all
services before and after.
"""

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field

import aiohttp
import numpy as np
import psutil

from tests.benchmarks.support.report import report
from tests.e2e.server import ServeProcess, serving

SEATS, STEP_MS, OUTPUT = 4, 20.0, 32
CAPACITY = SEATS / (OUTPUT * STEP_MS / 1000)
"""Requests per second."""


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
                if line.startswith(b'data: {"id"') and json.loads(line[6:])["choices"]:
                    first = first or time.perf_counter()
                    outcome.tokens += 1
            outcome.first_tokens.append(first - began)
    except aiohttp.ClientError:
        outcome.unanswered += 1


async def load(url: str, model: str, rate: float, seconds: float, prompt: int) -> LoadOutcome:
    rng, outcome = np.random.default_rng(0), LoadOutcome()
    body = {"model": model, "max_tokens": OUTPUT, "ignore_eos": True, "stream": True}
    async with (
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as tasks,
    ):
        began = due = time.perf_counter()
        while due < began + seconds:
            tokens = rng.integers(300, 1000, prompt).tolist()
            tasks.create_task(ask(session, body | {"prompt": tokens}, outcome))
            due += float(rng.exponential(1 / rate))
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
    return outcome


def memory(server: ServeProcess) -> float:
    """Return the resident memory of all services, MiB."""
    return sum(psutil.Process(service.pid).memory_info().rss for service in server.services.values()) / 2**20


def measure(server: ServeProcess, factor: float, seconds: float, prompt: int) -> dict[str, float]:
    before, model = memory(server), server.client().models.list().data[0].id
    began = time.perf_counter()
    outcome = asyncio.run(load(server.url, model, factor * CAPACITY, seconds, prompt))
    took = time.perf_counter() - began
    percentiles = {"p50": 50, "p99": 99}
    figures = {
        f"first_token_{n}_s": float(np.percentile(outcome.first_tokens, p)) for n, p in percentiles.items()
    }
    if outcome.refusals:
        figures |= {
            f"refusal_{n}_ms": 1e3 * float(np.percentile(outcome.refusals, p)) for n, p in percentiles.items()
        }
    return figures | {
        "served": len(outcome.first_tokens),
        "refused": len(outcome.refusals),
        "unanswered": outcome.unanswered,
        "other": outcome.other,
        "goodput": len(outcome.first_tokens) / took / CAPACITY,
        "memory_before_mib": before,
        "memory_after_mib": memory(server),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each load")
    parser.add_argument("--max-queue-seconds", type=float, default=0.25)
    parser.add_argument(
        "--base", type=float, default=0.9, help="share of the capacity that counts as a load of 1"
    )
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    args = parser.parse_args()
    layout = ("--backend", "sim", "--sim-step-ms", str(STEP_MS), "--max-num-seqs", str(SEATS))
    results = {}
    with serving(
        *layout, "--max-queue-seconds", str(args.max_queue_seconds), "--log-level", "warning"
    ) as server:
        for name, factor in {"1x": args.base, "10x": 10 * args.base, "1x again": args.base}.items():
            results[name] = measure(server, factor, args.seconds, args.prompt)
    ratio = results["10x"]["first_token_p99_s"] / results["1x"]["first_token_p99_s"]
    rows = [
        {"figure": figure, **{name: result.get(figure, "") for name, result in results.items()}}
        for figure in results["10x"]
    ]
    report("overload", "overload", rows, {"p99 of the first token, 10x / 1x": ratio}, vars(args), results)


if __name__ == "__main__":
    main()
