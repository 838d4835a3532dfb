"""`runahead doctor`: facts of this machine, and remarks about others."""

import os

import pytest

from services.cli import doctor
from services.worker import machine
from services.worker.kernels import selection
from tests.unit.cli.command import run_command

Capture = pytest.CaptureFixture[str]


def test_facts_of_this_machine(capsys: Capture) -> None:
    done = run_command(capsys, "doctor")
    assert (done.status, done.stderr) == (0, "")
    named = {line.split()[0] for line in done.stdout.splitlines()}
    assert {"Python", "packages", "processor", "kernels:", "memory", "model"} <= named
    processor = next(line for line in done.stdout.splitlines() if line.startswith("processor"))
    assert not {"wide", "pairs", "tiles"} & set(processor.split(": ")[1].split(", ")), "features of our own kernels"


def test_a_poor_machine_gets_a_remark_for_each_lack(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "processor_features", lambda: frozenset[str]())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(machine, "cores", lambda: 1)
    monkeypatch.setattr(machine, "free_memory", lambda: 1 << 30)
    monkeypatch.setattr(doctor, "packaged_model", lambda: None)
    text = run_command(capsys, "doctor").stdout
    for words in (
        "no AVX2", "no bfloat16 arithmetic", "half the bytes", "1 of 4 cores", "share one core",
        "1.0 GiB of memory are free", "default model is not installed",
    ):  # fmt: skip
        assert words in text


@pytest.mark.parametrize(
    ("package", "status", "hint"), [("torch", 1, "runahead-engine[native]"), ("numba", 0, "computes on a GPU alone")]
)
def test_what_a_missing_package_prevents_is_said_and_no_kernels_are_shown(
    package: str, status: int, hint: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "installed", lambda name: "" if name == package else "1.0")
    done = run_command(capsys, "doctor")
    assert done.status == status
    assert hint in done.stdout
    assert "kernels:" not in done.stdout
