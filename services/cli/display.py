"""Output of `serve` on stderr: the lines of its children, and the progress of loading."""

import sys
import time
from contextlib import suppress
from typing import Literal, TextIO

from services.cli.logs import json_line
from services.cli.readiness import LoadingState

QUIET_SECONDS = 3.0
"""Seconds from the start until phases of loading are shown, without a terminal."""


def write_line(text: str, stream: TextIO) -> None:
    """Write a line. A reader that has ended, or a full disk, is no reason to end the server."""
    with suppress(OSError):
        print(text, file=stream, flush=True)


class Display:
    """Output without a terminal: one line for each phase of loading, none for a fast start."""

    def __init__(self) -> None:
        self._quiet_until = time.monotonic() + QUIET_SECONDS
        self._shown = ""

    def line(self, text: str) -> None:
        write_line(text, sys.stderr)

    def loading(self, state: LoadingState) -> None:
        if state.phase != self._shown and time.monotonic() >= self._quiet_until:
            self._shown = state.phase
            self._loading(state.phase)

    def _loading(self, phase: str) -> None:
        self.line(f"serve     | loading: {phase}")

    def done(self) -> None:
        """End the display of progress."""


class JsonDisplay(Display):
    """Output as a JSON object per line."""

    def line(self, text: str) -> None:
        super().line(json_line("serve", text))

    def _loading(self, phase: str) -> None:
        self.line(f"loading: {phase}")


class TerminalDisplay(Display):
    """Output on a terminal: a progress bar below the lines of the children."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True, markup=False, emoji=False, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[percent]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None, percent="")
        self._bar.start()

    def line(self, text: str) -> None:
        with suppress(OSError):  # the terminal was closed
            self._console.print(text, soft_wrap=True)

    def loading(self, state: LoadingState) -> None:
        share = state.progress  # 0: not known yet
        self._bar.update(
            self._task,
            description=state.phase,
            total=1.0 if share else None,
            completed=share,
            percent=f"{share:.0%}" if share else "",
        )

    def done(self) -> None:
        self._bar.stop()


def display(form: Literal["text", "json"] = "text") -> Display:
    if form == "json":
        return JsonDisplay()
    return TerminalDisplay() if sys.stderr.isatty() else Display()
