"""The frontend's side of the process that renders chat templates."""

import logging
import os
import socket
import subprocess
import sys
import threading
import weakref

import msgspec

from services.checkpoint import CheckpointError
from services.frontend.templates import jobs, render_process
from services.frontend.templates.jobs import (
    LimitReached,
    Outcome,
    PipeClosed,
    RenderJob,
    TemplatesBroken,
    TemplateSources,
)

log = logging.getLogger("runahead.frontend")

START_SECONDS = 60.0
"""Time limit for a renderer to start and compile the templates."""
PATIENCE_SECONDS = 5.0
"""Time beyond a job's own limit after which the renderer is killed."""


class _Process:
    """One renderer. It ends with this object."""

    def __init__(self, sources: TemplateSources) -> None:
        """Raises: CheckpointError, if a template is broken"""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", render_process.__name__, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._connection = ours
        self.close = weakref.finalize(self, _end, self._process, ours)
        try:
            outcome = self.exchange(sources, START_SECONDS)
        except (PipeClosed, TimeoutError):
            outcome = TemplatesBroken("it takes too much time or memory to compile")
        if isinstance(outcome, TemplatesBroken):
            self.close()
            raise CheckpointError(f"the chat template is broken: {outcome.reason}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def exchange(self, message: msgspec.Struct, seconds: float) -> Outcome:
        """Raises: PipeClosed, if the process has ended; TimeoutError"""
        jobs.send(self._connection, message, seconds)
        outcome: Outcome = jobs.decode(jobs.receive(self._connection, seconds), Outcome)
        return outcome


def _end(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


class Renderer:
    """Renders templates in a separate process, which is started again after it has died. Thread-safe.

    One process is enough: a prompt takes well below a millisecond, and none takes more than its limit.
    """

    def __init__(self, sources: TemplateSources) -> None:
        """Raises: CheckpointError, if a template is broken"""
        self._sources = sources
        self._lock = threading.Lock()
        self._process: _Process | None = _Process(sources)

    @property
    def pid(self) -> int | None:
        """Process id of the renderer; None until it is started again."""
        return self._process.pid if self._process is not None else None

    def render(self, job: RenderJob) -> Outcome:
        with self._lock:
            if self._process is None:
                self._process = _Process(self._sources)
            try:
                return self._process.exchange(job, job.seconds + PATIENCE_SECONDS)
            except (PipeClosed, TimeoutError):
                log.warning("the renderer of chat templates is replaced: a template reached its limits")
                self._process.close()
                self._process = None
                return LimitReached("rendering it takes too much time or memory")
