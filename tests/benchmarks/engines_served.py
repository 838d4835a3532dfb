"""Engines behind our frontend, and behind SGLang's router under its old and new name, with the same load.

The engines are `sim`: real services that sleep as long as a device would compute. Ours are `serve --headless` behind
one frontend. A router needs servers with HTTP, so its engines have frontends of their own; its policy is cache_aware.
Sessions begin with one of some system prompts and have several turns; they arrive at the same times with the same
texts everywhere. Then the same load runs again, and all processes of one engine are killed in its middle.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from services.cli.preflight import free_port
from tests.benchmarks.support.report import add_ints, report
from tests.benchmarks.support.servers import ServerProcess, started, wait_for
from tests.waiting import wait_until

ROUTERS_ENVIRONMENT = Path(".venv-routers")
"""Environment with the routers; `make bench NAME=engines_served` makes it."""
ROUTERS = {
    "sglang-router": ("bin/python", "-m", "sglang_router.launch_router"),
    "smg": ("bin/python", "-m", "smg", "launch"),
}
OURS, HOST = "runahead", "127.0.0.1"


@dataclass(frozen=True)
class EngineShape:
    """A device that computes 10,000 prompt tokens/s and has room for 24,000 tokens."""

    step_ms: float = 10.0
    prefill_us: float = 100.0
    decode_us: float = 500.0
    blocks: int = 1500

    def flags(self) -> tuple[str, ...]:
        return (
            "--backend=sim", f"--sim-step-ms={self.step_ms}", f"--sim-prefill-token-us={self.prefill_us}",
            f"--sim-decode-us={self.decode_us}", f"--num-gpu-blocks-override={self.blocks}", "--max-num-seqs=64",
            "--max-model-len=8192", "--max-num-batched-tokens=1024", "--log-level=warning",
        )  # fmt: skip


@dataclass
class SessionTurn:
    at: float
    """Seconds since the begin of the load."""
    ttft: float = -1.0
    prompt: int = 0
    cached: int = 0
    error: str = ""


@dataclass
class EngineGroup:
    url: str
    engines: list[subprocess.Popen[str]] = field(default_factory=list)

    def kill_one(self) -> None:
        """Kill all processes of an engine."""
        session = self.engines[-1].pid
        os.killpg(session, signal.SIGSTOP)  # so that no supervisor sees the end of its children
        for process in ServerProcess("", session).processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGKILL)


@contextmanager
def ours(count: int, shape: EngineShape) -> Iterator[EngineGroup]:
    runahead = [sys.executable, "-m", "services.cli"]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ra-")))
        (directory / "engines").write_text("".join(f"ipc://{directory}/{n} - {n}\n" for n in range(count)))
        engines = [
            stack.enter_context(
                started([*runahead, "serve", "--headless", f"--client-endpoint=ipc://{directory}/{n}", *shape.flags()])
            )
            for n in range(count)
        ]  # fmt: skip
        url = f"http://{HOST}:{(port := free_port(HOST, 0))}"
        frontend = [*runahead, "frontend", f"--port={port}", f"--engines={directory}/engines", "--log-level=warning",
                    "--enable-admin-routes"]  # fmt: skip
        process = stack.enter_context(started(frontend))
        wait_for(f"{url}/readyz", process)
        ready = lambda: all(engine["state"] == "ready" for engine in _get(f"{url}/engines")["engines"])  # noqa: E731
        wait_until(ready, "all engines are ready")
        yield EngineGroup(url, engines)


@contextmanager
def routed(router: str, count: int, shape: EngineShape) -> Iterator[EngineGroup]:
    with ExitStack() as stack:
        ports = [free_port(HOST, 0) for _ in range(count)]
        engines = [
            stack.enter_context(
                started([sys.executable, "-m", "services.cli", "serve", f"--port={port}", *shape.flags()],
                        stdout=subprocess.DEVNULL)
            )
            for port in ports
        ]  # fmt: skip
        urls = [f"http://{HOST}:{port}" for port in ports]
        for url, process in zip(urls, engines, strict=True):
            wait_for(f"{url}/readyz", process)
        url = f"http://{HOST}:{(port := free_port(HOST, 0))}"
        program, *arguments = ROUTERS[router]
        command = [
            str(ROUTERS_ENVIRONMENT / program), *arguments, "--worker-urls", *urls, f"--host={HOST}",
            f"--port={port}", "--policy=cache_aware", "--log-level=error", f"--prometheus-port={free_port(HOST, 0)}",
        ]  # fmt: skip
        process = stack.enter_context(started(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        wait_for(f"{url}/v1/models", process)
        wait_until(lambda: _get(f"{url}/v1/models").get("data"), f"{router} finds an engine")
        yield EngineGroup(url, engines)


def _get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


class SessionLoad:
    """Sessions that arrive at random times, the same ones for each seed."""

    def __init__(self, url: str, args: argparse.Namespace, engines: int) -> None:
        self._url, self._args = url, args
        self._rng = random.Random(args.seed)
        self._rate = args.sessions_per_engine * engines
        self._systems = [self._text(args.system_words) for _ in range(args.systems)]
        self.turns: list[SessionTurn] = []
        self._began = 0.0

    def _text(self, words: int) -> str:
        return " ".join(f"w{self._rng.randrange(10_000)}" for _ in range(words))

    async def run(self, seconds: float) -> None:
        timeout = aiohttp.ClientTimeout(total=120)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            model = (await asyncio.to_thread(_get, f"{self._url}/v1/models"))["data"][0]["id"]
            self._began, sessions = time.monotonic(), []
            at = 0.0
            while (at := at + self._rng.expovariate(self._rate)) < seconds:
                texts = [self._text(self._args.user_words) for _ in range(self._args.turns)]
                pauses = [self._rng.expovariate(1 / self._args.pause) for _ in texts]
                prompt = self._systems[min(int(self._rng.paretovariate(1.2)) - 1, len(self._systems) - 1)]
                await asyncio.sleep(max(0.0, self._began + at - time.monotonic()))
                sessions.append(asyncio.create_task(self._session(http, model, prompt, texts, pauses, seconds)))
            await asyncio.gather(*sessions)

    async def _session(
        self, http: aiohttp.ClientSession, model: str, prompt: str, texts: Sequence[str], pauses: Sequence[float],
        seconds: float,
    ) -> None:  # fmt: skip
        for text, pause in zip(texts, pauses, strict=True):
            if (at := time.monotonic() - self._began) > seconds:
                return
            prompt += "\n" + text
            self.turns.append(turn := SessionTurn(at))
            answer = await self._ask(http, model, prompt, turn)
            if turn.error:
                return
            prompt += answer
            await asyncio.sleep(pause)

    async def _ask(self, http: aiohttp.ClientSession, model: str, prompt: str, turn: SessionTurn) -> str:
        body = {
            "model": model, "prompt": prompt, "max_tokens": self._args.output, "ignore_eos": True, "stream": True,
            "temperature": 0, "stream_options": {"include_usage": True},
        }  # fmt: skip
        began, answer, tokens = time.monotonic(), "", 0
        try:
            async with http.post(f"{self._url}/v1/completions", json=body) as response:
                if response.status != 200:
                    turn.error = f"status {response.status}"
                    return ""
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    if event.get("choices"):
                        if turn.ttft < 0:
                            turn.ttft = time.monotonic() - began
                        answer += event["choices"][0]["text"]
                    if usage := event.get("usage"):
                        turn.prompt, tokens = usage["prompt_tokens"], usage["completion_tokens"]
                        turn.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                    turn.error = str(event.get("error") or "")
        except (aiohttp.ClientError, TimeoutError) as error:
            turn.error = type(error).__name__
        if not turn.error and tokens != self._args.output:
            turn.error = f"{tokens} of {self._args.output} tokens"
        return answer


def measured(name: str, count: int, args: argparse.Namespace) -> dict[str, object]:
    """Return the figures of one kind of server: first without a fault, then while an engine dies."""
    shape, seconds = EngineShape(), float(args.seconds)
    with ours(count, shape) if name == OURS else routed(name, count, shape) as group:
        load = SessionLoad(group.url, args, count)
        asyncio.run(load.run(seconds))
        undisturbed = load.turns

        async def with_a_death() -> list[SessionTurn]:
            load = SessionLoad(group.url, args, count)
            running = asyncio.create_task(load.run(seconds))
            await asyncio.sleep(seconds / 2)
            group.kill_one()
            await running
            return load.turns

        disturbed = asyncio.run(with_a_death())
    late = [turn for turn in undisturbed if turn.at > seconds / 4 and not turn.error]
    times = sorted(turn.ttft for turn in late)
    lost = [turn.error for turn in disturbed if turn.error]
    row = {
        "engines": count,
        "in front": name,
        "requests": len(undisturbed),
        "cached share": sum(t.cached for t in late) / max(1, sum(t.prompt for t in late)),
        "TTFT p50, s": statistics.median(times),
        "TTFT p99, s": times[int(len(times) * 0.99)],
        "failed without a fault": sum(bool(turn.error) for turn in undisturbed),
        "lost with an engine": len(lost) / len(disturbed),
    }
    print(row, sorted(set(lost))[:5], f"{statistics.mean(t.prompt for t in late):.0f} tokens a prompt", flush=True)
    return row


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--front", nargs="+", default=[OURS, *ROUTERS], choices=[OURS, *ROUTERS])
    add_ints(parser, seconds=60, turns=4, system_words=250, user_words=60, repeats=1, seed=0)
    parser.add_argument("--sessions-per-engine", type=float, default=1.5, help="sessions per second and engine")
    parser.add_argument("--pause", type=float, default=4.0, help="mean seconds between turns")
    parser.add_argument("--systems", type=int, default=24, help="system prompts")
    parser.add_argument("--output", type=int, default=32, help="tokens of an answer")
    args = parser.parse_args()
    absent = {} if (ROUTERS_ENVIRONMENT / "bin" / "smg").exists() else dict.fromkeys(ROUTERS, "not installed")
    rows = [
        measured(name, count, args)
        for _ in range(args.repeats)
        for count in args.engines
        for name in args.front
        if name not in absent
    ]
    report(
        "engines_served",
        title="engines behind one front",
        rows=rows,
        figures={"absent": absent or "none"},
        settings={**vars(args), "engine": vars(EngineShape())},
        repeats=rows,
    )
