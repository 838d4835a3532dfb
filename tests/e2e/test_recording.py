"""`serve --record` with native workers: what happened replays exactly, and the command says so."""

import asyncio
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from services.cli.app import run
from services.scheduler.core.observer import (
    EpochEnded,
    GrammarReady,
    RequestFinished,
    RequestPreempted,
    RequestsAborted,
)
from services.scheduler.recording import EventRecording
from services.scheduler.recording.records import MaskRecord, PlanRecord
from tests.e2e.server import ServeProcess, serving, wait_until

DRAFTS = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
SETTINGS = (
    *("--threads", "1", "--kv-cache-memory-bytes", "64M", "--max-model-len", "256"),
    *("--num-gpu-blocks-override", "24", "--speculative-config", DRAFTS),
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}},
    "required": ["name"],
    "additionalProperties": False,
}
SECRET = "sphinx of black quartz judge my vow"


def bodies() -> list[dict[str, Any]]:
    """Return requests that share prefixes, exceed the KV cache together, and end in every way."""
    chats: list[dict[str, Any]] = [
        {
            "messages": [{"role": "user", "content": f"{SECRET}. Repeat after me {'one two three ' * 6}{i % 3}"}],
            "max_tokens": 90,
            "seed": i,
            "temperature": float(i % 2),
            "extra_body": {"ignore_eos": i % 3 > 0},
        }
        for i in range(10)
    ]
    for chat in chats[:3]:
        chat["extra_body"] = {"structured_outputs": {"json": SCHEMA}}
    chats[3]["n"] = 3
    chats[4]["extra_body"] = {"ignore_eos": True, "bad_words": ["the"]}
    chats[5]["logprobs"] = True
    for chat in chats[8:]:
        chat["max_tokens"] = 160  # it is aborted before
    return chats


async def talk(server: ServeProcess) -> None:
    async with server.async_client() as client:
        model = (await client.models.list()).data[0].id
        begun = asyncio.Event()

        async def one(number: int, body: dict[str, Any]) -> None:
            stream = await client.chat.completions.create(model=model, stream=True, **body)
            async for _ in stream:
                begun.set()
                if number >= 8:
                    await stream.close()  # the request is aborted
                    return

        async def disturb() -> None:
            await begun.wait()
            server.services["worker"].send_signal(signal.SIGKILL)

        await asyncio.gather(disturb(), *(one(number, body) for number, body in enumerate(bodies())))
        await one(0, {"messages": bodies()[0]["messages"], "max_tokens": 4})  # its prefix is cached


@pytest.mark.parametrize(
    "tokens", [pytest.param((), marks=pytest.mark.soak), ("--record-tokens",)], ids=["lengths", "tokens"]
)
def test_a_recorded_server_replays_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokens: tuple[str, ...]
) -> None:
    directory = tmp_path / "recordings"
    kv_events = json.dumps({"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/kv"})
    with serving("--record", str(directory), "--kv-events-config", kv_events, *tokens, *SETTINGS) as server:
        asyncio.run(talk(server))
        wait_until(lambda: server.metric("num_requests_running") == 0, "all requests have ended")
        server.stop()
    recording = EventRecording(directory)
    happened = Counter(type(record) for record in recording.records())
    assert not recording.torn
    for kind in (EpochEnded, GrammarReady, MaskRecord, RequestFinished, RequestPreempted, RequestsAborted):
        assert happened[kind], kind
    assert any(record.plan.drafts for record in recording.records() if isinstance(record, PlanRecord))
    assert run(["replay", str(directory)]) == 0
    assert f"equal: {happened[PlanRecord]:,} plans" in capsys.readouterr().out
