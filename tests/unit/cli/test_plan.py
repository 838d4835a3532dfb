"""`runahead plan`: the sizes that fit, from the configuration of a model alone."""

import pytest

from services.checkpoint import DEMO_MODEL
from services.worker import machine
from tests.unit.cli.command import Done, run_command

Capture = pytest.CaptureFixture[str]


def plan(capsys: Capture, *arguments: str) -> tuple[Done, dict[int, list[str]]]:
    """Return the rows by tensor-parallel size."""
    done = run_command(capsys, "plan", str(DEMO_MODEL), *arguments)
    rows = (line.split() for line in done.stdout.splitlines())
    return done, {int(row[0]): row[1:] for row in rows if row and row[0].isdigit()}


def test_each_size_that_the_model_allows_has_a_row(capsys: Capture) -> None:
    done, rows = plan(capsys, "--kv-cache-memory-bytes", "64M", "--max-model-len", "1K")
    assert done.status == 0
    assert list(rows) == [1, 2, 4]
    # Blocks of 64 KiB on one rank: 4 layers, 2 KV heads of 64, 16 tokens, keys and values in float32.
    assert rows[1] == ["7.9", "MiB", "64.0", "MiB", "1,024", "16,384", "16", "fits"]
    assert rows[2][4:7] == ["2,048", "32,768", "32"]
    assert rows[4][4:7] == ["2,048", "32,768", "32"]  # two ranks have the same KV head


def test_sizes_beyond_the_memory_do_not_fit(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: 100 << 20)
    done, rows = plan(capsys, "--kv-cache-memory-bytes", "64M")
    assert done.status == 0
    assert rows[1][-1] == "fits"
    assert " ".join(rows[2][7:]).startswith("does not fit: ")
    monkeypatch.setattr(machine, "free_memory", lambda: 1 << 20)
    assert plan(capsys, "--kv-cache-memory-bytes", "64M")[0].status == 1


def test_context_beyond_the_model_is_refused(capsys: Capture) -> None:
    done, _ = plan(capsys, "--max-model-len", "4096")
    assert (done.status, done.stdout) == (2, "")
    assert "more than the 2048 positions" in done.stderr
