"""`runahead run-batch` with services of its own, which end with the batch."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.checkpoint import DEMO_MODEL
from tests.e2e.forked import CODE
from tests.e2e.server import SIM, name_of
from tests.preloaded import OUTPUT, PreloadedProcess
from tests.waiting import wait_until

SHORT_PAUSES = "from services.cli.run_batch import requests; requests.PAUSE_SECONDS, requests.CONNECTS = 0.01, 100_000"
"""A batch that gives up after three pauses has then ended before another frontend is there."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., PreloadedProcess]]:
    """Start `run-batch` with these requests; its output is `out.jsonl`, its log `log`."""
    runtime = tmp_path / "run"
    runtime.mkdir()

    def start(requests: list[tuple[str, dict[str, Any]]], code: str = CODE) -> PreloadedProcess:
        source = tmp_path / "in.jsonl"
        source.write_text(
            "".join(
                json.dumps({"custom_id": str(i), "method": "POST", "url": url, "body": body}) + "\n"
                for i, (url, body) in enumerate(requests)
            )
        )
        arguments = (*SIM, "--max-concurrency", "4", "-i", str(source), "-o", str(tmp_path / "out.jsonl"))
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RUNAHEAD_")}
        environment = clean | {"XDG_RUNTIME_DIR": str(runtime), "RUNAHEAD_API_KEY": "sesame"}
        command = ("run-batch", str(DEMO_MODEL), *arguments)
        with (tmp_path / "log").open("w") as log:
            return PreloadedProcess(code, *command, pipes=(OUTPUT,), log=log, environment=environment, is_parent=True)

    yield start
    assert list(runtime.iterdir()) == [], "sockets or files are left"


def ended(process: PreloadedProcess, path: Path, status: int) -> tuple[str, list[Any]]:
    """Wait for the end. Return what it printed, and its answers."""
    with process.stdout:
        printed = process.stdout.read().decode()
    assert process.wait() == status, (path / "log").read_text()
    return printed, [json.loads(line)["response"] for line in (path / "out.jsonl").read_text().splitlines()]


def test_batch_starts_and_stops_its_services(start: Callable[..., PreloadedProcess], tmp_path: Path) -> None:
    requests = [
        ("/v1/completions", {"model": DEMO_MODEL.name, "prompt": "Hello", "max_tokens": 3}),
        ("/v1/embeddings", {"model": DEMO_MODEL.name, "input": "Hello"}),
        ("/v1/completions", {"model": "another", "prompt": "Hello"}),
    ]
    printed, answers = ended(start(requests), tmp_path, 1)
    assert "3 lines written" in printed
    assert answers[0]["status_code"] == 200
    assert answers[2]["status_code"] == 404
    assert answers[0]["body"]["usage"]["completion_tokens"] == 3


def test_batch_goes_on_when_its_frontend_is_killed(start: Callable[..., PreloadedProcess], tmp_path: Path) -> None:
    body = {"model": DEMO_MODEL.name, "prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
    process = start([("/v1/completions", body)] * 100, f"{SHORT_PAUSES}\n{CODE}")
    output = tmp_path / "out.jsonl"
    wait_until(lambda: output.exists() and output.stat().st_size > 0, "an answer is written")
    [frontend] = (child for child in psutil.Process(process.pid).children() if name_of(child) == "frontend")
    frontend.kill()
    _, answers = ended(process, tmp_path, 0)
    assert [answer["status_code"] for answer in answers] == [200] * 100
