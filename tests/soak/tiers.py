"""Soak of tiers: two engines that share a directory of KV blocks and fetch from each other, and everything that can be
killed or damaged is, at any moment. Answers stay equal."""

import asyncio
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

from services.worker.tiers.disk import TEMPORARY
from tests.e2e.server import ServeProcess, serving
from tests.metrics import samples
from tests.soak.load import Load
from tests.soak.served import with_log

BLOCK, NUM_BLOCKS, PROMPTS, PROMPT = 16, 120, 16, 400
"""All prompts together have three times the tokens of an engine's cache."""
LAYOUT = (
    "--backend", "sim", "--sim-step-ms", "2", "--sim-prefill-token-us", "300", "--max-model-len", "512",
    "--scheduler-timeout-seconds", "3", "--kv-cache-memory-bytes", str(NUM_BLOCKS * BLOCK * 8),
    "--data-parallel-size", "2", "--kv-offload-bytes", str(NUM_BLOCKS * BLOCK * 4), "--enable-admin-routes",
    "--kv-peer-address", "tcp://127.0.0.1:0",
)  # fmt: skip
"""Two engines whose blocks are in a part of the host's memory, in the directory, and at the other engine."""
ROUND = 40.0
"""Seconds between two deaths of everything."""
MAX_KILLS = 2
"""Services that die in a round: `serve` restarts each one three times within a minute."""
TIERS_PIECE = 60


def bodies() -> list[dict[str, Any]]:
    """Return requests of which two each share half of their prompt; every fourth one has a salt of its own."""
    found: list[dict[str, Any]] = []
    for i in range(PROMPTS):
        shared = [300 + (7 * (i // 2) + j) % 500 for j in range(PROMPT // 2)]
        own = [300 + (11 * i + 3 * j) % 500 for j in range(PROMPT // 2)]
        salt = {"cache_salt": f"salt {i}"} if i % 4 == 0 else {}
        found.append(
            {
                "prompt": shared + own,
                "max_tokens": 40,
                "seed": i,
                "temperature": float(i % 2),
                "extra_body": {"ignore_eos": True, **salt},
            }
        )
    return found


async def tier_faults(seconds: float, seed: int) -> tuple[Counter[str], list[str]]:
    """Run rounds for some time. Return what has happened, and what is wrong. `seed`: seconds before."""
    rng, happened, failures = random.Random(seed), Counter[str](), list[str]()
    expected: dict[int, Any] = {}
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="ra-kv-") as made:
        directory = Path(made) / "kv"
        while (left := until - time.monotonic()) > 0 and not failures:
            size = rng.choice(("16K", "256K", "64M"))
            with serving(*LAYOUT, "--kv-offload-dir", str(directory), "--kv-offload-dir-bytes", size) as server:
                failures += await _round(server, directory, min(left, ROUND), rng, expected, happened)
    return happened, failures


async def _round(
    server: ServeProcess,
    directory: Path,
    seconds: float,
    rng: random.Random,
    expected: dict[int, Any],
    happened: Counter[str],
) -> list[str]:
    """Run streams and faults, then kill everything in the middle of them. Return what is wrong."""
    everything = [server.process.pid, *(child.pid for child in psutil.Process(server.process.pid).children(True))]
    async with server.async_client() as client:
        load = Load(client, bodies(), expected)
        if not expected:
            try:
                await load.learn()
            except openai.APIError as error:
                return with_log([f"before the first fault: {error}"], server)
            expected.update(load.expected)
        until = time.monotonic() + seconds
        streams = [asyncio.create_task(load.stream(index, until)) for index in range(PROMPTS)]
        kills = sorted(time.monotonic() + seconds * rng.random() for _ in range(MAX_KILLS))
        while time.monotonic() < until or not (load.counts or load.failures):  # a busy machine answers late
            await asyncio.sleep(rng.expovariate(4.0))
            if kills and time.monotonic() > kills[0]:
                kills.pop(0)
                happened[_kill(server, rng)] += 1
            else:
                happened[await _damage(server.url, directory, load.bodies, rng)] += 1
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        begun = [asyncio.create_task(load.ask(index)) for index in range(PROMPTS)]
        await asyncio.sleep(rng.uniform(0.05, 0.5))
        page = (await asyncio.to_thread(server.get, "/metrics"))[1]
        for name in ("kv_tier_hit_tokens_total", "stream_moves_total"):  # of the schedulers that live
            for labels, count in samples(page, f"runahead:{name}"):
                happened[f"{name} {labels.get('tier', '')}".strip()] += int(count)
        server.find_services()
        for pid in {*everything, *(service.pid for service in server.services.values())}:
            if psutil.pid_exists(pid) and _is_of(pid, everything[0]):
                psutil.Process(pid).kill()
        await asyncio.gather(*begun, return_exceptions=True)
    happened["everything killed"] += 1
    happened.update(load.counts)
    return with_log(load.failures, server)


def _is_of(pid: int, serve: int) -> bool:
    """Return whether a process is `serve` or one of its children: a number may belong to another process by now."""
    try:
        return pid == serve or serve in [parent.pid for parent in psutil.Process(pid).parents()]
    except psutil.NoSuchProcess:
        return False


def _kill(server: ServeProcess, rng: random.Random) -> str:
    server.find_services()
    kind = rng.choice(("scheduler", "worker"))
    running = [process for name, process in server.services.items() if name.startswith(kind) and process.is_running()]
    if running:
        rng.choice(running).kill()
    return f"{kind} killed"


async def _damage(url: str, directory: Path, asked: list[dict[str, Any]], rng: random.Random) -> str:
    """Damage or remove files, or change what is kept. Return what was done."""
    action = rng.choice(("cut", "flipped", "removed", "moved", "pinned", "dropped", "reset"))
    if action in ("pinned", "dropped"):
        body = rng.choice(asked)
        salt = body["extra_body"].get("cache_salt")
        request = {"prompt": body["prompt"][: rng.choice((64, 200, 400))], "cache_salt": salt}
        await _control(url, request | {"action": "drop" if action == "dropped" else "pin"})
        if action == "pinned" and rng.random() < 0.5:
            await _control(url, {"action": "list"}, unpins=True)
        return f"prefixes {action}"
    if action == "reset":
        async with httpx.AsyncClient(timeout=30, verify=False) as client:
            await client.post(f"{url}/reset_prefix_cache")
        return "caches reset"
    await asyncio.to_thread(_damage_files, directory, action, rng)
    return f"files {action}"


def _damage_files(directory: Path, action: str, rng: random.Random) -> None:
    paths = [path for path in directory.rglob("*") if path.is_file() and not path.name.startswith(TEMPORARY)]
    for path in rng.sample(paths, min(len(paths), 8)):
        try:
            data = path.read_bytes()
            if action == "removed":
                path.unlink()
            elif action == "moved":  # the content of another block
                path.write_bytes(rng.choice(paths).read_bytes())
            else:
                at = rng.randrange(len(data) or 1)
                path.write_bytes(data[:at] if action == "cut" else data[:at] + b"\xff" + data[at + 1 :])
        except FileNotFoundError:  # a worker has removed it
            continue


async def _control(url: str, body: dict[str, Any], unpins: bool = False) -> None:
    """Send a request of an administrator, which may fail while an engine is lost. `unpins`: unpin what is listed."""
    async with httpx.AsyncClient(timeout=30, verify=False) as client:
        answer = await client.post(f"{url}/v1/cache", json=body)
        if unpins and answer.status_code == 200:
            for pin in {pin["pin"] for engine in answer.json()["engines"] for pin in engine["pins"]}:
                await client.post(f"{url}/v1/cache", json={"action": "unpin", "pin": pin})
