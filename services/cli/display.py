"""What `serve` shows people on stderr: the children's lines, and how far loading is."""

import sys
import time
from typing import Protocol

from services.cli.readiness import Readiness

LINE_INTERVAL = 3.0
"""Seconds between two lines about loading where there is no terminal."""


class Display(Protocol):
    def line(self, text: str) -> None: ...
    def loading(self, readiness: Readiness) -> None: ...
    def done(self) -> None:
        """Loading is over."""
        ...


class PlainDisplay:
    """One line now and then."""

    def __init__(self) -> None:
        self._next = time.monotonic() + LINE_INTERVAL

    def line(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def loading(self, readiness: Readiness) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_INTERVAL
            self.line(f"serve     | loading: {readiness.phase} ({readiness.progress:.0%})")

    def done(self) -> None:
        pass


class TerminalDisplay:
    """A progress bar below the children's lines."""

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

    def loading(self, readiness: Readiness) -> None:
        self._bar.update(self._task, description=readiness.phase, completed=readiness.progress)

    def done(self) -> None:
        self._bar.stop()


def display() -> Display:
    return TerminalDisplay() if sys.stderr.isatty() else PlainDisplay()
