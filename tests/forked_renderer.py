"""Forks the renderer of chat templates from its frontend instead of starting an interpreter, in each process that is
forked from one that has imported this module. `tests/unit/frontend/templates` starts renderers as they are served."""

import multiprocessing.popen_fork
import os
import resource
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from services import helper_process
from services.cli.supervisor import STOP_SIGNALS
from services.frontend.templates import render_process


class ForkedRenderer(multiprocessing.popen_fork.Popen):
    """`python -m services.frontend.templates.render_process FD PARENT_PID`, with the methods of `subprocess.Popen`."""

    def __init__(self, descriptor: str, parent: str, environment: Mapping[str, str]) -> None:
        self._arguments, self._environment = (descriptor, parent), environment
        super().__init__(self)

    def _bootstrap(self, parent_sentinel: int) -> int:
        """Run the renderer in the new process, with no file of the frontend but the renderer's."""
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.setpgid(0, 0)
        for number in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        own = int(self._arguments[0])
        os.closerange(3, own)
        os.closerange(own + 1, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(self._environment)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        render_process.MEGABYTES += pages * resource.getpagesize() >> 20  # what the frontend has is not its own
        return render_process.main(*self._arguments)


def start_helper(arguments: Sequence[str], *, env: Mapping[str, str], **options: Any) -> Any:
    if render_process.__name__ in arguments:
        return ForkedRenderer(*arguments[-2:], env)
    return subprocess.Popen(arguments, env=env, **options)


helper_process.subprocess = SimpleNamespace(Popen=start_helper, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]
