"""Sends streaming completion requests on a schedule and records the arrival of each token."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import numpy as np
import uvloop

from services.cli.ask import NoAnswer, ServerAddress, base_url, first_model
from services.config import BenchConfig


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    """The members of a stream's event that are read."""

    choices: list[msgspec.Raw] | None = None
    usage: _Usage | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(_Event)


@dataclass
class SentRequest:
    """A request and its response. Times are seconds on the monotonic clock."""

    prompt: list[int]
    started: float = 0.0
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """Arrival of each chunk with a choice."""
    output_tokens: int = 0
    """Number of tokens by the usage that the server reported, else the number of chunks."""
    error: str = ""


@dataclass(frozen=True)
class LoadResult:
    model: str
    requests: list[SentRequest]
    duration: float
    """Seconds from the first request to the last answer."""
    max_concurrent: int
    """Maximum number of requests open at once."""


def run_load(config: BenchConfig) -> LoadResult:
    """Raises: NoAnswer, if the server does not answer or names no model."""
    server = ServerAddress(base_url(config.base_url), config)
    if not (model := config.model or first_model(server)):
        raise NoAnswer("/v1/models names no model; give one with --model")
    return uvloop.run(_run(config, server, model))


def prompts(config: BenchConfig, count: int, seed: int) -> list[list[int]]:
    """Return `count` prompts of random token ids."""
    ids = np.random.default_rng(seed).integers(
        config.random_id_low, config.random_id_high, (count, config.random_input_len)
    )
    rows: list[list[int]] = ids.tolist()
    return rows


async def _run(config: BenchConfig, server: ServerAddress, model: str) -> LoadResult:
    async with aiohttp.ClientSession(
        server.url,
        headers=server.headers,
        # A connection for each request: a server may close one that it has kept open when the next request arrives.
        connector=aiohttp.TCPConnector(limit=0, force_close=True, ssl=server.tls()),
        timeout=aiohttp.ClientTimeout(total=config.timeout),
        read_bufsize=1 << 20,
    ) as session:
        body: dict[str, object] = {
            "model": model,
            "max_tokens": config.random_output_len,
            "temperature": config.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if config.ignore_eos:
            body["ignore_eos"] = True
        client = LoadClient(session, body, config.max_concurrency or config.num_prompts)
        for prompt in prompts(config, config.num_warmups, config.seed + 1):
            await client.send(SentRequest(prompt))
        client.max_open = 0
        requests = [SentRequest(prompt) for prompt in prompts(config, config.num_prompts, config.seed)]
        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            async for request in _arrivals(config, requests):
                tasks.create_task(client.send(request))
        return LoadResult(model, requests, time.perf_counter() - started, client.max_open)


async def _arrivals(config: BenchConfig, requests: list[SentRequest]) -> AsyncIterator[SentRequest]:
    """Yield each request at its arrival time: at once, or as a Poisson process of `request_rate` per second."""
    rng = np.random.default_rng(config.seed)
    due = time.perf_counter()
    for request in requests:
        yield request
        if config.request_rate is not None:
            due += float(rng.exponential(1.0 / config.request_rate))
            await asyncio.sleep(max(0.0, due - time.perf_counter()))


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a response. The reader's own iterator takes several times as long for a token."""
    rest = b""
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
    yield rest


class LoadClient:
    """Sends completions that differ in their prompts, at most `concurrency` at once. `body`: what they have in
    common."""

    def __init__(self, session: aiohttp.ClientSession, body: dict[str, object], concurrency: int) -> None:
        self.max_open = 0
        self._open = 0
        self._session, self._body = session, body
        self._slots = asyncio.Semaphore(concurrency)

    async def send(self, request: SentRequest) -> None:
        async with self._slots:
            self._open += 1
            self.max_open = max(self.max_open, self._open)
            request.started = time.perf_counter()
            try:
                await self._stream(request)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                request.error = f"{type(error).__name__}: {error}"
            request.ended = time.perf_counter()
            self._open -= 1

    async def _stream(self, request: SentRequest) -> None:
        async with self._session.post("/v1/completions", json=self._body | {"prompt": request.prompt}) as response:
            if response.status != 200:
                request.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                return
            counted, is_done = 0, False
            async for line in _lines(response.content):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    is_done = True
                    continue
                event = _EVENTS.decode(data)
                if event.error:
                    request.error = str(event.error)[:200]
                    return
                if event.usage is not None:
                    counted = event.usage.completion_tokens
                if event.choices:
                    request.arrivals.append(time.perf_counter())
            if not is_done:
                request.error = "the stream ended before its last event"
            request.output_tokens = counted or len(request.arrivals)
