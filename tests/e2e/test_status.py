"""`runahead status` of a running server."""

import json

import pytest

from tests.e2e.server import ServeProcess
from tests.unit.cli.command import run_command


def test_status_of_a_server(sim: ServeProcess, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_command(capsys, "status", sim.url)
    assert (done.status, done.stderr) == (0, "")
    first, *rows = done.stdout.splitlines()
    assert first.endswith(f" at {sim.url}: ready")
    named = {row[2:13].strip(): row[14:] for row in rows}
    assert "backend sim" in named["engine"]
    assert named["ranks"].startswith("registered 1")
    assert "running" in named["requests"]
    assert "blocks of 16 tokens" in named["KV cache"]
    found = json.loads(run_command(capsys, "status", f"{sim.url}/v1", "--json").stdout)
    assert (found["phase"], found["metrics"]["num_workers"]) == ("ready", 1)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://127.0.0.1:1/x y"])
def test_no_answer_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_command(capsys, "status", url)
    assert (done.status, done.stdout) == (1, "")
    assert done.stderr.startswith(f"runahead: {url}")
    assert done.stderr.count("\n") == 1
