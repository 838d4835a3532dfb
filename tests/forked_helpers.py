"""Forks the renderer of chat templates, and the processor of files if it has been imported, from their frontend
instead of starting interpreters, in each process that is forked from one that has imported this module.
`tests/unit/frontend/templates` starts renderers as they are served."""

import multiprocessing.popen_fork
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from services import helper_process
from services.cli.supervisor import STOP_SIGNALS
from services.frontend import media
from services.frontend.templates import render_process


class ForkedHelper(multiprocessing.popen_fork.Popen):
    """`python -m MODULE FD PARENT_PID`, with the methods of `subprocess.Popen`."""

    def __init__(self, module: Any, descriptor: str, parent: str, environment: Mapping[str, str]) -> None:
        self._module, self._arguments, self._environment = module, (descriptor, parent), environment
        super().__init__(self)

    def _bootstrap(self, parent_sentinel: int) -> int:
        """Run the helper in the new process, with no file of the frontend but the helper's."""
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
        status: int = self._module.main(*self._arguments)
        return status


def start_helper(arguments: Sequence[str], *, env: Mapping[str, str], **options: Any) -> Any:
    *_, name, descriptor, parent = arguments
    if name in (render_process.__name__, media.MODULE) and name in sys.modules:
        return ForkedHelper(sys.modules[name], descriptor, parent, env)
    return subprocess.Popen(arguments, env=env, **options)


helper_process.subprocess = SimpleNamespace(Popen=start_helper, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]
