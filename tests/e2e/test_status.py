"""`runahead status` of a running server."""

import json
import subprocess
import sys

import pytest

from tests.e2e.server import ServeProcess


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", "status", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_status_of_a_server(sim: ServeProcess) -> None:
    done = run(sim.url)
    assert (done.returncode, done.stderr) == (0, "")
    first, *rows = done.stdout.splitlines()
    assert first.endswith(f" at {sim.url}: ready")
    named = {row[2:13].strip(): row[14:] for row in rows}
    assert "backend sim" in named["engine"]
    assert named["ranks"].startswith("registered 1")
    assert "running" in named["requests"]
    assert "blocks of 16 tokens" in named["KV cache"]
    found = json.loads(run(f"{sim.url}/v1", "--json").stdout)
    assert (found["phase"], found["metrics"]["num_workers"]) == ("ready", 1)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://127.0.0.1:1/x y"])
def test_no_answer_is_one_line(url: str) -> None:
    done = run(url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"runahead: {url}")
    assert done.stderr.count("\n") == 1
