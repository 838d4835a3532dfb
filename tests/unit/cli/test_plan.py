"""`runahead plan`: the sizes that fit, from the configuration of a model alone."""

import pytest

from services.checkpoint import DEMO_MODEL
from services.cli import plan as plan_module
from services.cli import serving_memory
from services.worker import gpus, machine
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
    assert rows[1] == ["4.9", "MiB", "64.0", "MiB", "1,024", "16,384", "16", "fits"]
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


def test_the_speed_of_each_quantisation_is_bounded_by_the_bandwidth(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "read_bandwidth", lambda: 2.0**30)
    done, _ = plan(capsys, "--max-model-len", "1K")
    lines = {line.split(":")[0].strip(): line for line in done.stdout.splitlines() if "tokens/s" in line}
    assert list(lines) == ["as stored", "--quantization int8", "--quantization int4"]
    speeds = [int(line.split("at most ")[1].split()[0].replace(",", "")) for line in lines.values()]
    assert speeds == sorted(speeds)
    assert speeds[-1] > 2 * speeds[0]
    assert all("fits; at most" in line for line in lines.values())
    assert "reads 1.0 GiB/s (measured)" in done.stdout


def test_a_gpu_is_planned_with_its_own_memory(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = gpus.Gpu("NVIDIA Example", total=100 << 20, free=95 << 20)
    monkeypatch.setattr(gpus, "gpus", lambda: [gpu])
    monkeypatch.setattr(serving_memory, "installed", lambda _: "2.13.0+cu130")
    done, rows = plan(capsys, "--max-model-len", "1K")
    assert "85.0 MiB of NVIDIA Example (100.0 MiB) may be used" in done.stdout
    assert list(rows) == [1]
    assert rows[1][2:4] == ["80.1", "MiB"]  # what the weights leave
    done, _ = plan(capsys, "--max-model-len", "1K", "--gpu-memory-utilization", "0.05")
    assert done.status == 1
    done, rows = plan(capsys, "--device", "cpu")
    assert list(rows) == [1, 2, 4]


def test_gpus_are_read_from_the_output_of_nvidia_smi() -> None:
    text = "NVIDIA H200, 143771, 143000\nNVIDIA A, B, 1024, 24\n[Insufficient Permissions], [N/A], [N/A]\n\n"
    assert [*gpus.parse(text)] == [
        gpus.Gpu("NVIDIA H200", 143771 << 20, 143000 << 20),
        gpus.Gpu("NVIDIA A, B", 1 << 30, 24 << 20),
    ]
