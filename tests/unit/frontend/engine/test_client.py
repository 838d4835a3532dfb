"""The client of the engine against a real socket."""

import asyncio
from pathlib import Path

import pytest

from protocol.requests import EnginePhase, EngineState
from protocol.transport import HandshakeRefused, Server
from services.frontend.engine.client import EngineClient


@pytest.mark.parametrize(("theirs", "fits"), [("same", True), ("", True), ("other", False)])
async def test_scheduler_with_another_tokenizer_is_refused(tmp_path: Path, theirs: str, fits: bool) -> None:
    server = Server(f"ipc://{tmp_path}/c", {"frontend"})
    client = EngineClient(server.endpoint, 1, 10.0, 300.0, 600.0, tokenizer="same")
    running = asyncio.create_task(client.run())
    while not running.done() and client.state.phase is not EnginePhase.READY:
        if (received := server.receive()) is not None:
            server.send(received[0], EngineState(EnginePhase.READY, tokenizer=theirs))
        await asyncio.sleep(0.01)
    if fits:
        assert client.ready
        running.cancel()
    else:
        with pytest.raises(
            HandshakeRefused, match=r"tokenizer mismatch: .* digest same, .* other; give both the same"
        ):
            await running
    await asyncio.wait({running})
    server.close()
