"""Recovery of `serve` as its clients see it: SIGKILL of the worker or of the scheduler at random moments.

64 streams with grammars, drafts, penalties, log-probabilities and n = 3 run on the demo model. Each answer is compared
with the one of a run without a fault. Detection ends with the first line of the log about the loss. The pause ends with
the first token of any stream after the next epoch has begun.

`--contexts` instead measures the pause of one stream of the default model whose context has so many tokens: a new
worker reads the weights, a new scheduler keeps the worker, and both adopt the blocks of the context. With `--moves` it
is the longest time without a token while the stream moves to a second engine, which computes the context: its own one
drains, or all processes of that one are killed.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any

import httpx

from services.checkpoint.default_model import packaged_model
from tests.benchmarks.support.report import add_ints, report
from tests.e2e.server import ServeProcess, serving
from tests.e2e.streams import engines_of
from tests.soak.load import Load, bodies

DRAFTS = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
DEMO = ("--threads", "1", "--kv-cache-memory-bytes", "256M", "--speculative-config", DRAFTS, "--max-num-seqs", "128")
LOST = re.compile(r"(\d{4}-\S+ \S+,\d{3}) WARNING .*(?:is lost|closed the connection|has ended)")
READY = re.compile(r"(\d{4}-\S+ \S+,\d{3}) INFO runahead.scheduler: ready: epoch")
KILLS_PER_SERVER = 3
"""As many as `serve` restarts a service within a minute."""
VICTIMS = ("worker", "scheduler")
MOVES = ("killed", "drained")
TWO_ENGINES = ("--threads", "1", "--data-parallel-size", "2", "--enable-admin-routes")
SHARES = 0.05, 0.6
"""Share of the answers that has arrived when a service is killed."""


class StreamsEnded(Exception):
    """The client was so far behind the server that all tokens had been computed before the kill."""


async def kill(server: ServeProcess, victim: str, load: Load, answers: asyncio.Future[Any]) -> tuple[float, float]:
    """Kill a service while `answers` are streamed. Return the seconds until it was noticed and until the next token.

    Raises: StreamsEnded; openai.APIError, if a stream failed
    """
    server.find_services()
    process = next(process for name, process in server.services.items() if name.startswith(victim))
    seen = len(server.log.read_text())
    offset, killed = time.time() - time.monotonic(), time.monotonic()
    process.send_signal(signal.SIGKILL)
    while not (found := READY.search(server.log.read_text(), seen)):  # noqa: ASYNC110  a file
        await asyncio.sleep(0.01)
    noticed, ready = (_seconds(match) for match in (LOST.search(server.log.read_text(), seen), found))
    while load.last_token < ready - offset:
        if answers.done():
            await answers
            raise StreamsEnded
        await asyncio.sleep(0.005)
    return noticed - offset - killed, load.last_token - killed


def _seconds(match: re.Match[str] | None) -> float:
    """Return the time of a line of the log, seconds since 1970."""
    return datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()


async def moments(victim: str, count: int, streams: int, tokens: int, seed: int) -> list[dict[str, float]]:
    """Return the figures of each kill."""
    rng, found = random.Random(seed), list[dict[str, float]]()
    while len(found) < count:
        with serving(*DEMO) as server:
            async with server.async_client() as client:
                load = Load(client, bodies(streams, tokens))
                await load.learn()
                characters = load.num_characters
                for _ in range(min(KILLS_PER_SERVER, count - len(found))):
                    loads = server.metric("weight_loads")
                    due = load.num_characters + rng.uniform(*SHARES) * characters
                    answers = asyncio.gather(*map(load.ask, range(streams)))
                    while load.num_characters < due and not answers.done():  # noqa: ASYNC110  precise enough
                        await asyncio.sleep(0.002)
                    try:
                        detection, pause = await kill(server, victim, load, answers)
                    except StreamsEnded:  # another moment
                        await load.ask(0)  # waits for the new service
                        continue
                    equal = sum(a == load.expected[i] for i, a in enumerate(await answers))
                    found.append({
                        "detection_s": detection, "pause_s": pause, "equal": equal,
                        "loads": server.metric("weight_loads") - loads,
                    })  # fmt: skip
                    print(victim, found[-1], flush=True)
    return found


Disturb = Callable[[ServeProcess, str, Load, asyncio.Future[Any]], Awaitable[float]]
"""Let a cause strike while an answer is streamed. Return the pause, seconds."""


async def pauses_of(
    causes: Sequence[str], disturb: Disturb, settings: Sequence[str], contexts: list[int], repeats: int
) -> list[dict[str, Any]]:
    """Return the pause of one stream for each length of its context and each cause."""
    rows: list[dict[str, Any]] = []
    for context in contexts:
        row: dict[str, Any] = {"context": context}
        for cause in causes:
            pauses = list[float]()
            with serving("--max-num-seqs", "1", *settings, RUNAHEAD_MODEL="") as server:
                async with server.async_client() as client:
                    for number in range(repeats):
                        prompt = [300 + 100 * number + i % 1000 for i in range(context)]  # one that no engine knows
                        body = {"prompt": prompt, "max_tokens": 250, "extra_body": {"ignore_eos": True}}
                        load = Load(client, [body])
                        answer = asyncio.create_task(load.ask(0))
                        while not load.last_token:  # noqa: ASYNC110  precise enough
                            await asyncio.sleep(0.01)
                        pauses.append(await disturb(server, cause, load, answer))
                        await answer
            row[f"{cause}: pause_s"] = statistics.median(pauses)
        print(row, flush=True)
        rows.append(row)
    return rows


async def kill_once(server: ServeProcess, victim: str, load: Load, answer: asyncio.Future[Any]) -> float:
    return (await kill(server, victim, load, answer))[1]


async def move(server: ServeProcess, cause: str, load: Load, answer: asyncio.Future[Any]) -> float:
    """Let the stream move. Return the longest time without a token after that, seconds."""
    async with httpx.AsyncClient(base_url=server.url) as http:
        [stream] = (await http.get("/engines/streams")).json()["streams"]
        last, pause, owner = load.last_token, 0.0, f"/engines/{stream['engine']}/drain"
        if cause == "drained":
            await http.post(owner)
        else:
            for pid in engines_of(server)[stream["engine"]]["pids"]:
                os.kill(pid, signal.SIGKILL)
        while not answer.done():
            await asyncio.sleep(0.001)
            pause, last = max(pause, load.last_token - last), load.last_token
        await http.post(owner, params={"cancel": True})
    await asyncio.to_thread(server.wait_engines, 2)
    return pause


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--victim", choices=VICTIMS, default="scheduler")
    add_ints(parser, moments=20, streams=64, tokens=120, seed=0, repeats=1)
    parser.add_argument("--contexts", type=int, nargs="+", help="tokens, such as 256 1024 4096 8000")
    parser.add_argument("--moves", action="store_true", help="the contexts of a stream that moves")
    args = parser.parse_args()
    if args.contexts:
        if packaged_model() is None:
            raise SystemExit("the default model is not installed: make setup")
        causes, disturb, settings = (MOVES, move, TWO_ENGINES) if args.moves else (VICTIMS, kill_once, ())
        rows = asyncio.run(pauses_of(causes, disturb, settings, args.contexts, args.repeats))
        pauses = {cause: {str(row["context"]): row[f"{cause}: pause_s"] for row in rows} for cause in causes}
        figures = {"pause_seconds": pauses}
        report("recovery_served", "Pause by length of the context", rows, figures, {"model": "default"}, rows)
        return
    found = asyncio.run(moments(args.victim, args.moments, args.streams, args.tokens, args.seed))
    row = {"victim": args.victim, "moments": len(found)}
    for name in ("detection_s", "pause_s"):
        values = [kill[name] for kill in found]
        row |= {f"{name} median": statistics.median(values), f"{name} worst": max(values)}
    row |= {"equal": min(kill["equal"] for kill in found), "weight loads": max(kill["loads"] for kill in found)}
    settings = {"streams": args.streams, "tokens": args.tokens, "model": "demo"}
    report("recovery_served", f"SIGKILL of the {args.victim} under {args.streams} streams", [row], row, settings, found)
