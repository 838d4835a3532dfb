"""Servers of the default model, for clients in an environment of their own (`make test-clients`).

The clients' environment has none of Runahead's packages: nothing here imports them.
"""

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUNAHEAD = ROOT / ".venv" / "bin" / "runahead"
ARGUMENTS = (
    "serve", "--port", "0", "--max-model-len", "2048", "--kv-cache-memory-bytes", "256M", "--dtype", "float32",
    "--log-level", "warning",
)  # fmt: skip


def run(*command: str, directory: Path = ROOT) -> str:
    """Return the output of a program that is a client. It must succeed."""
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


class RunningServer(NamedTuple):
    url: str
    """Without /v1."""
    model: str


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[RunningServer]:
    with tempfile.TemporaryDirectory(prefix="ra-") as runtime:
        process = subprocess.Popen(
            [str(RUNAHEAD), *ARGUMENTS, *arguments],
            env=os.environ | {"XDG_RUNTIME_DIR": runtime},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            match = re.search(r"Serving (\S+) at (\S+)/v1", process.stdout.readline())
            assert match, "the server did not start"
            yield RunningServer(match[2], match[1])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            process.stdout.close()  # type: ignore[union-attr]  a pipe


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


@pytest.fixture(autouse=True)
def environment(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one thing that a user of these programs changes."""
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", server.url)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "none")
