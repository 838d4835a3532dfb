"""Output of `serve` on stderr: the lines of its children, and the progress of loading."""

import sys
import time
from typing import Protocol

from services.cli.readiness import LoadingState

LINE_INTERVAL = 3.0
"""Seconds between two lines about loading, without a terminal."""


class Display(Protocol):
    def line(self, text: str) -> None: ...
    def loading(self, state: LoadingState) -> None: ...
    def done(self) -> None:
        """End the display of progress."""
        ...


class PlainDisplay:
    """Output without a terminal: a line about loading every few seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + LINE_INTERVAL

    def line(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def loading(self, state: LoadingState) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_INTERVAL
            self.line(f"serve     | loading: {state.phase} ({state.progress:.0%})")

    def done(self) -> None:
        pass


class TerminalDisplay:
    """Output on a terminal: a progress bar below the lines of the children."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True, markup=False, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=1.0)
        self._bar.start()

    def line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def loading(self, state: LoadingState) -> None:
        self._bar.update(self._task, description=state.phase, completed=state.progress)

    def done(self) -> None:
        self._bar.stop()


def display() -> Display:
    return TerminalDisplay() if sys.stderr.isatty() else PlainDisplay()
