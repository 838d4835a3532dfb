"""A child process of the supervisor: what it writes, the phase of its start, when it is started again, how it ended."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from services.cli.logs import log_entry
from services.process import EXIT_HUNG, PHASE_MARK

RESTARTS, RESTART_WINDOW = 3, 60.0
"""Maximum number of restarts of a child within a number of seconds."""
FIRST_PAUSE = 0.5
"""Seconds until the first restart, doubled for each further one."""
MAX_READ = 1 << 17
"""Bytes of output that are read at a time: more than a pipe holds, and no more of a child that writes without end. Also
the length at which a line ends."""
FIRST_PHASE = "starting Python"
"""Phase of a child that has sent none yet."""
SIGNAL_NAMES = {int(number): number.name for number in signal.Signals}
"""Real-time signals between the first and the last have no name."""


@dataclass
class Child:
    name: str
    process: subprocess.Popen[bytes]
    respawn: Callable[[], subprocess.Popen[bytes]]
    """Starts the process again."""
    end_expected: bool = False
    """This child, or one before it in the order of stopping, was signalled to stop."""
    last_line: str = ""
    """The last one that is not of the log."""
    last_error: str = ""
    output_ended: bool = False
    phase: str = FIRST_PHASE
    """Phase of its start; `STARTED` when it has ended."""
    final: Collection[int] = ()
    """Exit statuses after which the child is not restarted."""
    restart_at: float | None = None
    """Time of the next restart, monotonic clock, seconds. None: no restart is due."""
    unexpected_ends: list[float] = field(default_factory=list)
    """Times of unexpected ends within the window, monotonic clock, seconds."""
    stopped_at: float | None = None
    """Time at which the child was found to be stopped, monotonic clock, seconds. None: it runs."""
    is_trial: bool = False
    """The others go on without it if it ends unexpectedly, and it is not restarted."""
    retired_at: float | None = None
    """Time from which the child, which has been stopped alone, is killed, monotonic clock, seconds. None: it stays."""
    restart_dropped: bool = False
    """The child ended unexpectedly, and a stop began before its restart."""
    _incomplete_line: bytes = b""

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process."""
        if self.process.returncode is not None:
            return False
        try:
            stopped = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # it has just ended
            return False
        return stopped is not None

    def lines(self) -> list[str]:
        """Return complete lines of output since the last call, and an incomplete one once the output has ended.

        Lines about the phase of the start are stored instead.
        """
        pipe = self.process.stdout
        if pipe is None or self.output_ended:
            return []
        chunk = b""
        with contextlib.suppress(BlockingIOError):
            while len(chunk) < MAX_READ:
                chunk += (data := os.read(pipe.fileno(), 1 << 16))
                if not data:
                    self.output_ended = True
                    break
        *whole, self._incomplete_line = (self._incomplete_line + chunk).split(b"\n")
        if self._incomplete_line and (self.output_ended or len(self._incomplete_line) > MAX_READ):
            whole.append(self._incomplete_line)
            self._incomplete_line = b""
        lines = []
        for line in (line.decode(errors="replace") for line in whole):
            if line.startswith(PHASE_MARK):
                self.phase = line.removeprefix(PHASE_MARK)
                continue
            lines.append(line)
            match log_entry(line):
                case "ERROR" | "CRITICAL", message:
                    self.last_error = message or self.last_error
                case None:
                    self.last_line = line.strip() or self.last_line
        return lines

    def schedule_restart(self, now: float) -> bool:
        """Set `restart_at` after an unexpected end. Return False if the child must not be restarted."""
        if self.process.returncode in self.final:
            return False
        self.unexpected_ends = [*(at for at in self.unexpected_ends if at > now - RESTART_WINDOW), now]
        if len(self.unexpected_ends) > RESTARTS:
            return False
        self.restart_at = now + FIRST_PAUSE * 2 ** (len(self.unexpected_ends) - 1)
        return True

    def expect_end(self) -> None:
        """Mark the end of the child as expected and drop a restart that is due."""
        self.restart_dropped |= self.restart_at is not None
        self.end_expected, self.restart_at = True, None

    def signal(self, number: int) -> None:
        self.end_expected, self.restart_at = True, None
        if self.alive:
            self.process.send_signal(number)

    def restart(self) -> None:
        """Start the process again. Nothing that the process before has written counts any more.

        Raises: OSError
        """
        self.restart_at, self.phase = None, FIRST_PHASE
        self.last_line, self.last_error, self._incomplete_line = "", "", b""
        self.process = self.respawn()
        self.output_ended = False

    def describe_end(self) -> str:
        code = self.process.poll()
        if code is not None and code < 0:
            return f"{self.name} was killed by {SIGNAL_NAMES.get(-code, f'signal {-code}')}"
        if code == EXIT_HUNG:
            return f"{self.name} hung and ended itself; the lines before have the stacks of its threads"
        reason = self.last_error or self.last_line
        return f"{self.name} exited with status {code}" + (f": {reason}" if reason else "")
