"""Changes of settings, with a double in place of the supervisor."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from services.frontend.engine.replan import Replans
from services.frontend.errors import APIError
from tests.waiting import PATIENCE

READY = SimpleNamespace(ready=True)


@asynccontextmanager
async def replans(
    directory: Path, answers: dict[str, dict[str, Any]], engines: dict[str, Any] | None = None
) -> AsyncIterator[Replans]:
    """Yield replans of a server whose new engine is ready. The supervisor leaves without the other answers."""

    async def supervise(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = json.loads(await reader.readline())
        if (answer := answers.get(request["do"])) is not None:
            writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    ledger = SimpleNamespace(owned=lambda _: [])
    client: Any = SimpleNamespace(check_ready=lambda: None, engines=engines or {"1": READY}, ledger=ledger)
    async with await asyncio.start_unix_server(supervise, directory / "control"):
        yield Replans(client, str(directory / "control"))


class EngineInDoubt:
    """The new engine: one of its signs of life is late while the supervisor adopts it."""

    refusal = ""

    def __init__(self) -> None:
        self._ready = iter([True, False])

    @property
    def ready(self) -> bool:
        return next(self._ready, True)


class DrainingEngines(dict[str, Any]):
    drained = ""

    def drain(self, name: str) -> None:
        if not self["2"].ready:
            raise APIError(409, f"engine {name} is the only one that serves")
        self.drained += name


async def test_a_new_engine_that_is_in_doubt_for_a_moment_replaces_all_the_same(tmp_path: Path) -> None:
    answers: dict[str, dict[str, Any]] = {"start": {"engine": "2", "replaces": ["0", "1"]}}
    answers |= {request: {} for request in ("status", "adopt", "stop")}
    engines = DrainingEngines({name: EngineInDoubt() for name in "012"})
    async with replans(tmp_path, answers, engines) as changes:
        await changes.begin({}, 60.0, 60.0)
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=PATIENCE)
        assert (changes.status["phase"], engines.drained) == ("done", "01")


START = {"start": {"engine": "1", "replaces": ["0"]}}


async def test_of_two_changes_at_once_one_is_refused(tmp_path: Path) -> None:
    async with replans(tmp_path, START) as changes:
        begun = [changes.begin({}, 60.0, 60.0) for _ in range(2)]
        first, second = await asyncio.gather(*begun, return_exceptions=True)
        assert first == "1"
        assert isinstance(second, APIError)
        assert second.status == 409


async def test_a_change_fails_with_the_supervisor_and_the_next_one_may_begin(tmp_path: Path) -> None:
    async with replans(tmp_path, START) as changes:
        for _ in range(2):
            await changes.begin({}, 60.0, 60.0)
            await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=PATIENCE)
            assert changes.status["phase"] == "failed"
            assert "the supervisor does not answer" in changes.status["detail"]
