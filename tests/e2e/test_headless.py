"""`serve --headless`: engines alone, over tcp with keys, behind a frontend that reads their list."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.checkpoint import DEMO_MODEL
from services.cli.preflight import free_port
from services.cli.transport_keys import make_keys
from tests.e2e.server import SIM, HttpServer, ServeProcess, wait_until
from tests.e2e.streams import COMMAND, answers, engines_of
from tests.preloaded import PreloadedProcess


class FrontendProcess(HttpServer):
    def __init__(self, directory: Path) -> None:
        port = free_port("127.0.0.1", 0)
        self.url, self.log = f"http://127.0.0.1:{port}", directory / "frontend.log"
        clean = {key: value for key, value in os.environ.items() if not key.startswith("RUNAHEAD_")}
        with self.log.open("w") as log:
            self.process = PreloadedProcess(
                *(COMMAND, "frontend", "--model", str(DEMO_MODEL), "--port", str(port), "--enable-admin-routes"),
                *("--engines", str(directory / "engines"), "--transport-keys", str(directory / "frontend")),
                log=log, environment=clean,
            )  # fmt: skip


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[dict[str, ServeProcess]]:
    """Two engines, whose list is in `tmp_path`, with the keys of all roles."""
    make_keys(tmp_path)
    lines, found = "", dict[str, ServeProcess]()
    with contextlib.ExitStack() as stack:
        for name in ("left", "right"):
            endpoint = f"tcp://127.0.0.1:{free_port('127.0.0.1', 0)}"
            lines += f"{endpoint} - {name}\n"
            keys = "--transport-keys", str(tmp_path / "scheduler")
            found[name] = ServeProcess("--headless", "--client-endpoint", endpoint, *keys, *SIM)
            stack.callback(found[name].clean_up)
        (tmp_path / "engines").write_text(lines)
        yield found


async def test_the_streams_of_an_engine_that_is_stopped_move(
    tmp_path: Path, engines: dict[str, ServeProcess], undisturbed_sim: list[Any]
) -> None:
    frontend = FrontendProcess(tmp_path)
    try:
        wait_until(lambda: frontend.get("/readyz")[0] == 200, "an engine serves")
        wait_until(lambda: {e["state"] for e in engines_of(frontend).values()} == {"ready"}, "both engines serve")
        async with frontend.async_client() as client:
            engines["left"].find_services()
            assert sorted(engines["left"].services) == ["scheduler", "worker"]

            async def stop() -> None:
                engines["left"].signal(signal.SIGTERM)

            assert await answers(client, stop) == undisturbed_sim
        assert engines["left"].wait() == 0, engines["left"].log.read_text()
        engines["left"].assert_nothing_is_left()
        assert frontend.metric("stream_moves_total") > 0
        found = json.loads(frontend.get("/engines/streams")[1])
        assert (found["open"], found["streams"]) == (0, [])
        assert {(move["source"], move["target"], move["reason"]) for move in found["moves"]} == {
            ("left", "right", "draining")
        }
    finally:
        frontend.process.kill()
        frontend.process.wait()
