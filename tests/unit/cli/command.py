"""Runs a command of `runahead`, in this process or in one of its own."""

import os
import subprocess
import sys
from typing import NamedTuple
from unittest import mock

import pytest

from services.cli.app import run


class Done(NamedTuple):
    status: int
    stdout: str
    stderr: str


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> Done:
    """Run a command in this process. For commands that do not start a service."""
    with mock.patch.dict(os.environ, {"COLUMNS": "200"}):
        status = run(list(arguments))
    return Done(status, *capsys.readouterr())


def run_process(*arguments: str) -> Done:
    """Run a command in a process of its own, without settings from this environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RUNAHEAD_")}
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", *arguments],
        env={**environment, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return Done(done.returncode, done.stdout, done.stderr)
