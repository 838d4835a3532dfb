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

READY = SimpleNamespace(ready=True)


@asynccontextmanager
async def replans(directory: Path, answers: dict[str, dict[str, Any]]) -> AsyncIterator[Replans]:
    """Yield replans of a server whose new engine is ready. The supervisor leaves without the other answers."""

    async def supervise(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = json.loads(await reader.readline())
        if (answer := answers.get(request["do"])) is not None:
            writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    client: Any = SimpleNamespace(check_ready=lambda: None, engines={"1": READY})
    async with await asyncio.start_unix_server(supervise, directory / "control"):
        yield Replans(client, str(directory / "control"))


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
            await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=20)
            assert changes.status["phase"] == "failed"
            assert "the supervisor does not answer" in changes.status["detail"]
