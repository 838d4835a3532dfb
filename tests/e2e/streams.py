"""Streams of many kinds against a server that is disturbed in the middle of them, and what must be true afterwards."""

import asyncio
import json
import os
import signal
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from openai import APIError, AsyncOpenAI

from tests.e2e.server import HttpServer, ServeProcess, wait_until
from tests.metrics import samples, total
from tests.preloaded import ERRORS, OUTPUT, PreloadedProcess

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 40}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "find_city", "parameters": CITY}}
COMMAND = "import sys; from services.cli import main; sys.exit(main())"
Fault = Callable[[], Awaitable[None]]
KINDS = range(16) if os.environ.get("RUNAHEAD_SOAK") else (0, 3, 4, 5, 9, 10, 11, 12)
"""Numbers of the `bodies`. Per change a greedy and a sampled request of each kind, but a sampled one with n = 3."""


def bodies() -> list[dict[str, Any]]:
    """Return eight requests with 10 answers, in the soak sixteen with 20: greedy and sampled ones, penalties, logprobs,
    grammars, n = 3."""
    plain: list[dict[str, Any]] = [
        {"prompt": f"Number {i} is", "max_tokens": 120, "seed": i, "temperature": float(i % 2)} for i in range(16)
    ]
    for body in plain:
        body["extra_body"] = {"ignore_eos": True}
    for body in plain[0:4]:
        body |= {"frequency_penalty": 2.0, "logprobs": 2}
    for body in plain[4:8]:
        body["extra_body"] = {"structured_outputs": {"json": SCHEMA}, "min_tokens": 30}
    for body in plain[8:10]:
        body |= {"n": 3, "max_tokens": 60}
    plain[10]["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    return [plain[number] for number in KINDS]


def num_choices() -> int:
    """Return the number of answers to the `bodies`."""
    return sum(body.get("n", 1) for body in bodies())


async def answers(
    client: AsyncOpenAI,
    fault: Fault | None = None,
    on_text: Callable[[int, str], None] = lambda *_: None,
    prefix: str = "",
    times: int = 1,
) -> list[Any]:
    """Return text, finish reason and log-probabilities of each choice. The fault comes when all streams have begun.

    Args:
        on_text: called with the number of the stream and its new text, from when all have begun.
        prefix: of all prompts.
        times: number of the `bodies`, each time with other prompts.
    """
    model = (await client.models.list()).data[0].id
    requests = [
        body | {"prompt": f"{prefix}{'Again. ' * turn}{body['prompt']}"} for turn in range(times) for body in bodies()
    ]
    begun = asyncio.Barrier(len(requests) + 1)

    async def one(number: int, body: dict[str, Any]) -> Any:
        choices: dict[int, list[Any]] = {}
        waits = True
        # The client's objects of each chunk would take half of this process's time
        async with client.completions.with_streaming_response.create(model=model, stream=True, **body) as response:
            async for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                if waits:
                    waits = False
                    await begun.wait()
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    on_text(number, choice["text"])
                    text, reason, scores = choices.setdefault(choice["index"], ["", None, []])
                    scores += choice["logprobs"]["tokens"] if choice["logprobs"] else []
                    choices[choice["index"]] = [text + choice["text"], choice["finish_reason"] or reason, scores]
        return choices

    async def disturb() -> None:
        await begun.wait()
        if fault is not None:
            await fault()

    *texts, _ = await asyncio.gather(*map(one, range(len(requests)), requests), disturb())
    return texts


async def answers_of(server: HttpServer, fault: Fault | None = None, prefix: str = "", times: int = 1) -> list[Any]:
    """Return the `answers` of a server."""
    async with server.async_client() as client:
        return await answers(client, fault, prefix=prefix, times=times)


async def open_streams(client: AsyncOpenAI, count: int, tokens: int = 2000) -> list[Any]:
    """Open `count` streams with usage and read the first token of each."""
    model = (await client.models.list()).data[0].id

    async def one(number: int) -> Any:
        stream = await client.completions.create(
            model=model, prompt=f"Number {number}", max_tokens=tokens, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        await anext(stream)
        return stream

    return await asyncio.gather(*(one(number) for number in range(count)))


async def text_and_error(client: AsyncOpenAI, prompt: str | list[int], max_tokens: int) -> tuple[str, str]:
    """Return what a greedy stream has sent, and the error that has ended it; "": none has."""
    found, model = "", (await client.models.list()).data[0].id
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
    try:
        async for chunk in await client.completions.create(
            model=model, stream=True, extra_body={"ignore_eos": True}, **body
        ):
            found += chunk.choices[0].text if chunk.choices else ""
    except APIError as error:
        return found, str(error)
    return found, ""


async def restart(server: ServeProcess, *names: str, number: int = signal.SIGKILL) -> None:
    """Send a signal to services and wait for the next ones."""
    before = {name: server.services[name] for name in names}
    for process in before.values():
        process.send_signal(number)
    while any(server.services[name] == process for name, process in before.items()):
        await asyncio.sleep(0.02)
        server.find_services()


async def kill_engine(server: ServeProcess, name: str) -> None:
    """Kill the scheduler and the worker of an engine, and wait until the supervisor has started others."""
    await restart(server, f"scheduler-{name}", f"worker-{name}")


def num_files(server: ServeProcess) -> dict[str, int]:
    """Return the open files of each service."""
    return {name: service.num_fds() for name, service in server.services.items()}


def assert_no_file_is_left(server: ServeProcess, before: dict[str, int]) -> None:
    """`before`: open files of each service at an earlier time. A client may have had fewer connections then."""

    def grown() -> dict[str, int]:
        return {name: count for name, count in num_files(server).items() if count > before[name]}

    wait_until(lambda: not grown(), f"no more open files than {before}")


def requests_total(server: HttpServer) -> dict[str, float]:
    """Return the requests that have ended, by outcome."""
    totals = defaultdict[str, float](float)
    for labels, count in samples(server.get("/metrics")[1], "runahead:requests_total"):
        totals[labels["outcome"]] += count
    return {outcome: count for outcome, count in totals.items() if count}


def run_command(*arguments: str, fails: bool = False) -> str:
    """Run a command of `runahead`, and return what it prints."""
    process = PreloadedProcess(COMMAND, *arguments, pipes=(OUTPUT, ERRORS), is_parent=True)
    with process.stdout, process.stderr:
        printed = process.stdout.read().decode() + process.stderr.read()
    assert (process.wait() != 0) is fails, printed
    return printed


def engines_of(server: HttpServer) -> dict[str, dict[str, Any]]:
    """Return the engines of a server with routes for administrators, by name."""
    return {engine["name"]: engine for engine in json.loads(server.get("/engines")[1])["engines"]}


def moves(server: HttpServer) -> float:
    """Return the number of moved streams."""
    return total(server.get("/metrics")[1], "runahead:stream_moves_total")


def assert_nothing_is_kept(server: HttpServer) -> None:
    """No request runs or waits, and no KV block is in use."""
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        wait_until(lambda name=name: server.metric(name) == 0, f"{name} is 0")  # type: ignore[misc]
