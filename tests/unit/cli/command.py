"""Runs a command of `runahead`, in this process or in one of its own."""

import os
from functools import cache
from typing import NamedTuple
from unittest import mock

import pytest
import typer.main

from services.cli.app import run
from tests.preloaded import ERRORS, OUTPUT, PreloadedProcess

made = cache(typer.main.get_command)
"""Makes the options of all commands once, which takes longer than most commands."""


class Done(NamedTuple):
    status: int
    stdout: str
    stderr: str


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> Done:
    """Run a command in this process, whose log stays as it is. For commands that do not start a service."""
    call = mock.patch.object(typer.Typer, "__call__", lambda app, *given, **more: made(app)(*given, **more))
    with call, mock.patch.dict(os.environ, {"COLUMNS": "200"}), mock.patch("services.cli.logs.configure"):
        status = run(list(arguments))
    return Done(status, *capsys.readouterr())


def run_process(*arguments: str) -> Done:
    """Run a command in a process of its own, without settings from this environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RUNAHEAD_")}
    code = "import sys; from services.cli import main; sys.exit(main())"
    process = PreloadedProcess(
        code, *arguments, pipes=(OUTPUT, ERRORS), environment={**environment, "COLUMNS": "200"}, is_parent=True
    )
    with process.stdout, process.stderr:
        out, err = process.stdout.read().decode(), process.stderr.read()
    return Done(process.wait(60), out, err)
