"""`runahead serve` without starting interpreters: the supervisor runs in a forked process and forks its services.

What the services import takes longer than most tests. The services run the same entry point with the same arguments and
environment.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import GenericAlias
from typing import Any

from services.cli import child_process, supervisor
from services.cli.supervisor import STOP_SIGNALS
from tests.preloaded import ForkedProcess

CODE = "import sys; from tests.e2e.forked import main; sys.exit(main())"
ENTRY_POINT = "services.cli.child"
STOPPED_GRACE = "TEST_STOPPED_GRACE"
"""Environment variable with another value of the supervisor's constant, seconds."""
FIRST_PAUSE = 0.1
"""Seconds until the first restart of a service: tests wait for many restarts. Its start takes longer."""
STARTED = subprocess.Popen
"""Services start their own child processes with it."""


class ForkedService(ForkedProcess):
    """A service of `serve` in a forked process."""

    __class_getitem__ = classmethod(GenericAlias)

    def __init__(self, arguments: Sequence[str], *, env: Mapping[str, str], **_: Any) -> None:
        own = arguments[arguments.index(ENTRY_POINT) + 1 :]
        reader, writer = os.pipe()
        process = multiprocessing.get_context("fork").Process(target=_run, args=(own, dict(env), writer))
        # A signal must not run a handler of the supervisor in the service.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(writer)
        self._process = process
        self.stdout = os.fdopen(reader, "rb", 0)

    @property
    def returncode(self) -> int | None:
        return self.poll()


def _run(arguments: Sequence[str], environment: dict[str, str], output: int) -> None:
    """Run a service in a process group of its own, with no file of the supervisor but standard input and outputs."""
    subprocess.Popen = STARTED  # type: ignore[misc]
    for number in (*STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.setpgid(0, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)
    Path("/proc/self/comm").write_text(Path(arguments[1]).stem)  # how `ServeProcess` finds a service

    from services.cli.child import main as run_service

    sys.exit(run_service(*arguments))


def main() -> int:
    """Run the command line in `sys.argv`, `serve ...`, in this process, which has been forked with all imports."""
    from services.cli import main as run_command

    subprocess.Popen = ForkedService  # type: ignore[misc,assignment]
    child_process.FIRST_PAUSE = FIRST_PAUSE
    supervisor.STOPPED_GRACE = float(os.environ.get(STOPPED_GRACE, supervisor.STOPPED_GRACE))
    return run_command()
