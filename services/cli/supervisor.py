"""Child processes that live and die together, in one thread: their lines and deaths, signals and deadlines go through
one selector, so that an idle supervisor sleeps."""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from services.cli.logs import error_text

ABORT_GRACE = 1.0
"""Seconds that children get after SIGTERM when there is nothing to wait for."""
STOP_GRACE = 30.0
"""Seconds that an orderly stop of a service without clients may take; a second of work, on a very busy machine."""
RESTARTS, RESTART_WINDOW = 3, 60.0
"""A child that may come back does so at most so often in so many seconds."""
FIRST_PAUSE = 0.5
"""Seconds until it comes back, doubled each time."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass
class Child:
    name: str
    process: subprocess.Popen[bytes]
    told: bool = False
    """It was asked to stop, or the one before it was: its end is no surprise."""
    last_line: str = ""
    last_error: str = ""
    silent: bool = False
    """Its output has ended."""
    respawn: Callable[[], subprocess.Popen[bytes]] | None = None
    """Starts it again, if it may come back."""
    final: Collection[int] = ()
    """Exit statuses after which it would only end in the same way."""
    due: float | None = None
    """When it comes back."""
    ended: list[float] = field(default_factory=list)
    """When it ended unasked, within the window."""
    excused: bool = False
    """It ended unasked, but would have come back had there been time."""
    _rest: bytes = b""

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def lines(self) -> list[str]:
        """Whole lines that arrived on its output since the last call; what is left of it once that has ended."""
        pipe = self.process.stdout
        if pipe is None or self.silent:
            return []
        chunk = b""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(pipe.fileno(), 1 << 16):
                chunk += data
            self.silent = True
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        if self.silent and self._rest:
            whole.append(self._rest)
        lines = [line.decode(errors="replace") for line in whole]
        for line in lines:
            self.last_line = line.strip() or self.last_line
            self.last_error = error_text(line) or self.last_error
        return lines

    def comes_back(self, now: float) -> bool:
        """Whether its unasked end is one to recover from; then `due` says when."""
        if self.respawn is None or self.process.returncode in self.final:
            return False
        self.ended = [*(at for at in self.ended if at > now - RESTART_WINDOW), now]
        if len(self.ended) > RESTARTS:
            return False
        self.due = now + FIRST_PAUSE * 2 ** (len(self.ended) - 1)
        return True

    def expect_end(self) -> None:
        """Its end is no surprise any more, and it does not come back only to be stopped."""
        self.told, self.excused, self.due = True, self.excused or self.due is not None, None

    def signal(self, number: int) -> None:
        self.told, self.due = True, None
        if self.alive:
            self.process.send_signal(number)

    def how_it_ended(self) -> str:
        code = self.process.poll()
        if code is not None and code < 0:
            return f"{self.name} was killed by {signal.Signals(-code).name}"
        reason = self.last_error or self.last_line
        return f"{self.name} exited with status {code}" + (f": {reason}" if reason else "")


class Supervisor:
    """Starts children and waits for them.

    SIGTERM, SIGINT or SIGHUP stops them one after the other in the order in which they were started, each when the one
    before has ended; a second signal stops all at once. When one ends unasked the others are stopped, too.
    """

    def __init__(self, show: Callable[[str, str], None]) -> None:
        self.children: list[Child] = []
        self.failure: Child | None = None
        """The first that ended unasked, or that ended badly when it was asked to stop."""
        self.draining = False
        self._show = show
        self._asked: Child | None = None
        self._aborted_by = 0
        self._deadline: float | None = None
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_writer = socket.socketpair()

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        environment: dict[str, str],
        comes_back: bool = False,
        final: Collection[int] = (),
    ) -> None:
        """Its own process group: a Ctrl-C in the terminal is the supervisor's to handle.

        Args:
            comes_back: started again when it ends unasked, a few times, after growing pauses.
            final: exit statuses after which it is not.
        """

        def spawn() -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                arguments,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            self._selector.register(process.stdout, selectors.EVENT_READ)
            return process

        self.children.append(Child(name, spawn(), respawn=spawn if comes_back else None, final=final))

    def wait(self, tick: Callable[[], float | None]) -> int:
        """Runs until all children have ended.

        Args:
            tick: called again and again; returns the seconds until it wants to be called next, None: no hurry.

        Returns:
            0 after an orderly stop, 128 + the signal's number after a second one, else what the failed child returned.
        """
        try:
            while any(child.alive or child.due is not None for child in self.children):
                self._selector.select(self._timeout(None if self._stopping else tick()))
                self._restart()
                with contextlib.suppress(BlockingIOError):
                    self._on_signals(self._wakeup.recv(64))
                self._look()
            return self._status()
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends whatever is left, and waits for it."""
        for child in self.children:
            child.signal(signal.SIGKILL)
            child.process.wait()
            self._read(child)
            if child.process.stdout is not None:
                child.process.stdout.close()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Within, signals are events of the loop; enter before the first `start`."""
        for end in (self._wakeup, self._wakeup_writer):
            end.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        numbers = (*STOP_SIGNALS, signal.SIGCHLD)
        before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        fd = signal.set_wakeup_fd(self._wakeup_writer.fileno())
        try:
            yield
        finally:
            signal.set_wakeup_fd(fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            self._wakeup.close()
            self._wakeup_writer.close()

    # -- events --------------------------------------------------------------------------------------------------

    @property
    def _stopping(self) -> bool:
        return self.draining or self.failure is not None

    def _timeout(self, wanted: float | None) -> float | None:
        now, times = time.monotonic(), [self._deadline, *(child.due for child in self.children)]
        left = [max(0.0, at - now) for at in times if at is not None]
        return min(left if wanted is None else [wanted, *left], default=None)

    def _restart(self) -> None:
        """Those whose pause is over."""
        for child in self.children:
            if child.due is not None and child.respawn is not None and time.monotonic() >= child.due:
                if child.process.stdout is not None:
                    child.process.stdout.close()
                child.due, child.silent, child.process = None, False, child.respawn()

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number not in STOP_SIGNALS:
                continue
            if self.draining:
                self._aborted_by = number
                self._abort()
            self.draining = True

    def _look(self) -> None:
        """Reads what the children say, sees who ended, goes on with the stop, and enforces the deadline."""
        for child in reversed(
            self.children
        ):  # who ended first depends on who comes later, seldom the reverse
            self._read(child)
            if child.alive or child.told or child.due is not None or self.failure is not None:
                continue
            if not self._stopping and child.comes_back(time.monotonic()):
                self._show(child.name, f"{child.how_it_ended()}; it is started again")
                continue
            self.failure = child
            self._abort()
        if self.draining and self.failure is None and not self._aborted_by:
            self._stop_next()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            for child in self.children:
                if child.told:
                    child.signal(signal.SIGKILL)

    def _read(self, child: Child) -> None:
        for line in child.lines():
            self._show(child.name, line)
        pipe = child.process.stdout
        if child.silent and pipe is not None and pipe in self._selector.get_map():
            self._selector.unregister(pipe)

    def _stop_next(self) -> None:
        """Asks the first that still runs to stop. The first of all may take as long as its clients need."""
        for position, child in enumerate(self.children):
            if not child.alive:
                continue
            if child is not self._asked:
                self._asked = child
                child.signal(signal.SIGTERM)
                self._deadline = None if position == 0 else time.monotonic() + STOP_GRACE
                for later in self.children[position + 1 :] if position else ():
                    later.expect_end()
            return

    def _abort(self) -> None:
        """Everybody stops now."""
        for child in self.children:
            child.signal(signal.SIGTERM)
        self._deadline = time.monotonic() + ABORT_GRACE

    def _status(self) -> int:
        if self._aborted_by and self.failure is None:
            return 128 + self._aborted_by
        for child in self.children:
            ended_well = child.excused or child.process.returncode in (0, -signal.SIGTERM)
            if self.failure is None and not ended_well:
                self.failure = child
        if self.failure is None:
            return 0
        code = self.failure.process.returncode
        return code if code > 0 else 128 - code if code < 0 else 1
