"""Output of `serve` on stderr: the lines of its children, and the progress of loading."""

import select
import sys
import time
from contextlib import suppress
from typing import Literal, TextIO

from services.cli.logs import json_line
from services.cli.readiness import LoadingState

QUIET_SECONDS = 3.0
"""Seconds from the start until phases of loading are shown, without a terminal."""
PATIENCE = 1.0
"""Seconds to wait for a slow reader of the output, until it has caught up."""
PIECE = 1024
"""Characters that fit into a pipe that takes any, which are 4096 bytes at most."""


def write_line(text: str, stream: TextIO, end: str = "\n") -> None:
    """Write a line. A reader that has ended, or a full disk, is no reason to end the server."""
    with suppress(OSError):
        print(text, end=end, file=stream, flush=True)


class Display:
    """Output without a terminal: one line for each phase of loading, none for a fast start.

    Lines that nobody reads, as behind `| less` or after Ctrl-S, are dropped and counted: while the supervisor waited
    for the reader, services would wait for the supervisor, and their ends would not be seen.
    """

    loading_line = "serve     | loading: {phase}"

    def __init__(self) -> None:
        self._quiet_until = time.monotonic() + QUIET_SECONDS
        self._shown = ""
        self._dropped = 0
        self._waited = 0.0
        """Seconds of waiting since the reader had caught up last."""

    def line(self, text: str) -> None:
        if self._dropped and self._has_room():
            dropped, self._dropped = self._dropped, 0
            self.line(f"{dropped} lines were dropped: nobody read this output")
        self._dropped += not self._write(text)

    def _write(self, text: str) -> bool:
        """Return False if the line, or its end, was dropped."""
        for start in range(0, len(text) + 1, PIECE):
            if not self._has_room():
                return False
            piece = text[start : start + PIECE]
            write_line(piece, sys.stderr, end="" if len(piece) == PIECE else "\n")
        return True

    def _has_room(self) -> bool:
        if _is_writable(0.0):
            self._waited = 0.0
            return True
        began = time.monotonic()
        has_room = _is_writable(max(0.0, PATIENCE - self._waited))
        self._waited += time.monotonic() - began
        return has_room

    def loading(self, state: LoadingState) -> None:
        if state.phase != self._shown and time.monotonic() >= self._quiet_until:
            self._shown = state.phase
            self.line(self.loading_line.format(phase=state.phase))

    def done(self) -> None:
        """End the display of progress."""


class JsonDisplay(Display):
    """Output as a JSON object per line."""

    loading_line = "loading: {phase}"

    def line(self, text: str) -> None:
        super().line(json_line("serve", text))


class TerminalDisplay(Display):
    """Output on a terminal: a progress bar below the lines of the children."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        super().__init__()
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

    def _write(self, text: str) -> bool:
        if not self._has_room():
            return False
        with suppress(OSError):  # the terminal was closed
            self._console.print(text, soft_wrap=True)
        return True

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


def _is_writable(seconds: float) -> bool:
    """Return whether stderr takes output, now or within so many seconds."""
    try:
        return bool(select.select([], [sys.stderr], [], seconds)[1])
    except (OSError, ValueError):  # it is no file, or closed
        return True


def display(form: Literal["text", "json"] = "text") -> Display:
    if form == "json":
        return JsonDisplay()
    return TerminalDisplay() if sys.stderr.isatty() else Display()
