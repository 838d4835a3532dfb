"""Processes that start with the imports of the services done, which takes longer than most tests.

The standard library's fork server imports MODULES once for each pytest process; every process is forked from it.
"""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import IO, BinaryIO

MODULES = [
    "tests.ranks.process",
    "services.cli.app",
    "services.cli.serve",
    "services.cli.start",
    "services.frontend.service",
    "services.scheduler.service",
    "services.worker.service",
    "services.worker.backends.native",
    "services.worker.backends.sim",
    "tests.loaded_kernels",
    "tests.forked_helpers",
]
INPUT, OUTPUT, ERRORS = 0, 1, 2


class ForkedProcess:
    """A process of `multiprocessing` with a part of `subprocess.Popen`."""

    _process: BaseProcess

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status; minus the number of the signal that ended the process; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status.

        Raises: subprocess.TimeoutExpired
        """
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # the fork server has reaped it, and its status is not read yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class PreloadedProcess(ForkedProcess):
    """`python -c CODE ARGUMENTS` in a forked process."""

    stdin: BinaryIO
    stdout: BinaryIO
    stderr: IO[str]

    def __init__(
        self,
        code: str,
        *arguments: str,
        pipes: Collection[int] = (),
        log: IO[str] | None = None,
        environment: Mapping[str, str] = os.environ,
        is_parent: bool = False,
    ) -> None:
        """
        Args:
            pipes: INPUT, OUTPUT and ERRORS that become the pipes `stdin`, `stdout` (both unbuffered) and `stderr`.
            log: file for ERRORS.
            environment: as it is now.
            is_parent: the process may start processes with `multiprocessing`.
        """
        theirs: dict[int, Connection] = {}
        if log is not None:
            theirs[ERRORS] = Connection(os.dup(log.fileno()), readable=False)
        for number in pipes:
            reader, writer = os.pipe()
            mine, other = (writer, reader) if number == INPUT else (reader, writer)
            theirs[number] = Connection(other, readable=number == INPUT, writable=number != INPUT)
            match number:
                case 0:
                    self.stdin = os.fdopen(mine, "wb", 0)
                case 1:
                    self.stdout = os.fdopen(mine, "rb", 0)
                case 2:
                    self.stderr = os.fdopen(mine, errors="replace")  # a killed process may end in a character
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(MODULES)
        self._process = context.Process(
            target=_run, args=(code, arguments, dict(environment), theirs), daemon=not is_parent
        )
        self._process.start()
        for connection in theirs.values():
            connection.close()


def _run(code: str, arguments: tuple[str, ...], environment: dict[str, str], streams: dict[int, Connection]) -> None:
    gc.freeze()  # a collection then leaves out what was imported
    os.environ.clear()
    os.environ.update(environment)
    packages = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in packages if path and path not in sys.path]
    for number, connection in streams.items():
        os.dup2(connection.fileno(), number)
        connection.close()
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
