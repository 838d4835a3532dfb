"""Supervisor of child processes that start and end together, in one thread.

Output and ends of children, signals and deadlines all go through one selector, so that an idle supervisor sleeps.
"""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from services.cli.child_process import Child
from services.process import STARTED, signals_to

ABORT_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL when all children are stopped at once. A frontend ends its streams meanwhile."""
STOP_GRACE = 30.0
"""Seconds that the orderly stop of a child may take, except for the first one, which waits for its clients. It takes
about one second on an idle machine."""
RETIRE_GRACE = 10.0
"""Seconds that a child may take to end which is stopped alone."""
STOPPED_GRACE = 10.0
"""Seconds after which a child that was stopped (SIGSTOP) is killed."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ABORT_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""End a child at once: a service drains after one signal, and ends after two. Two equal ones may arrive as one."""


class Supervisor:
    """Starts children and waits until all have ended.

    SIGTERM, SIGINT or SIGHUP stops the children one after the other, the last started one first, each when the one
    before has ended. A second signal stops all at once. When a child ends unexpectedly and is not restarted, all others
    are stopped.
    """

    def __init__(self, show: Callable[[str, str], None], first_needs_others: bool = True) -> None:
        """`first_needs_others`: until the first child has ended, the others must not, as the engines of a frontend.
        Otherwise they end by themselves when it stops, as the workers of a scheduler."""
        self._first_needs_others = first_needs_others
        self.children: list[Child] = []
        """In the order in which they are stopped."""
        self.failure: Child | None = None
        """The first child that ended unexpectedly, or that failed when it was stopped."""
        self._draining = False
        self._show = show
        self._stopping_child: Child | None = None
        self._aborted_by = 0
        self._deadline: float | None = None
        self._poll: float | None = None
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_writer = socket.socketpair()

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        environment: dict[str, str],
        final: Collection[int] = (),
        is_trial: bool = False,
    ) -> None:
        """Start a child in a process group of its own, so that only the supervisor handles Ctrl-C from the terminal.

        It is restarted after an unexpected end, up to `RESTARTS` times, after growing pauses.

        Args:
            final: exit statuses after which it is not restarted.
            is_trial: start it beside those that run already: it is stopped after them, the others go on if it ends, and
                it is not restarted before `adopt`.
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

        child = Child(name, spawn(), spawn, final=final, is_trial=is_trial)
        self.children.insert(len(self.children) if is_trial else 0, child)

    def watch(self, source: socket.socket, on_readable: Callable[[], None]) -> None:
        """Call a function in the loop whenever a socket is readable. Call it within `signals`."""
        self._selector.register(source, selectors.EVENT_READ, on_readable)

    def adopt(self, names: Collection[str]) -> None:
        """Treat children that were started on trial like the others from now on."""
        for child in self.children:
            if child.name in names:
                child.is_trial = False

    def end_of(self, names: Collection[str]) -> str:
        """Return how the first of these children has ended, or ""."""
        found = [child for child in self.children if child.name in names]
        missing = "" if len(found) == len(names) else "its services have ended"
        return next((child.describe_end() for child in found if not child.alive), missing)

    def retire(self, names: Collection[str]) -> None:
        """Stop some children, and forget them when they have ended. The others go on."""
        for child in self.children:
            if child.name in names:
                child.signal(signal.SIGTERM)
                child.retired_at = time.monotonic() + RETIRE_GRACE

    def wait(self, tick: Callable[[], float | None]) -> int:
        """Run until all children have ended.

        Args:
            tick: called after every event; returns the seconds until the next call at the latest, None: no limit.

        Returns:
            0 after an orderly stop, 128 + the signal's number after a second signal, else the failed child's status.
        """
        try:
            while any(child.alive or child.restart_at is not None for child in self.children):
                for key, _ in self._selector.select(self._timeout(None if self._stopping else tick())):
                    if key.data is not None:
                        key.data()
                self._restart()
                with contextlib.suppress(BlockingIOError):
                    self._on_signals(self._wakeup.recv(64))
                self._check_children()
            return self._status()
        finally:
            self.kill()

    def phase(self) -> str:
        """Return what the children that have not started do, such as "importing torch (2 workers)"; "": all have."""
        doing = dict[str, Counter[str]]()
        for child in reversed(self.children):
            if child.phase != STARTED:
                doing.setdefault(child.phase, Counter())[child.name.partition("-")[0]] += 1
        return ", ".join(
            f"{phase} ({', '.join(f'{n} {name}s' if n > 1 else name for name, n in counts.items())})"
            for phase, counts in doing.items()
        )

    def stop(self) -> None:
        """Stop the children in order, as after a first signal. May be called from any thread while `signals` or
        `open` is in effect."""
        with contextlib.suppress(OSError):  # the loop has ended
            self._wakeup_writer.send(bytes([signal.SIGTERM]))

    def kill(self) -> None:
        """End all children that are left, and wait for them."""
        for child in self.children:
            child.signal(signal.SIGKILL)
            child.process.wait()
            self._read(child)
            self._close(child)

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Make signals events of the loop within this context. Enter it before the first `start`."""
        with self.open(), signals_to(self._wakeup_writer, (*STOP_SIGNALS, signal.SIGCHLD)):
            yield

    @contextlib.contextmanager
    def open(self, poll: float | None = None) -> Iterator[None]:
        """Make `stop` work within this context, without signals, so in any thread. `poll`: seconds between two looks
        for children that have ended; None: SIGCHLD shows it."""
        self._poll = poll
        with self._selector, self._wakeup, self._wakeup_writer:
            for end in (self._wakeup, self._wakeup_writer):
                end.setblocking(False)
            self._selector.register(self._wakeup, selectors.EVENT_READ)
            yield

    # -- events --------------------------------------------------------------------------------------------------

    @property
    def _stopping(self) -> bool:
        return self._draining or self.failure is not None

    def _timeout(self, tick_seconds: float | None) -> float | None:
        now, times = time.monotonic(), [self._deadline, *(child.restart_at for child in self.children)]
        times += [child.stopped_at + STOPPED_GRACE for child in self.children if child.stopped_at is not None]
        times += [child.retired_at for child in self.children if child.alive]
        left = [max(0.0, at - now) for at in times if at is not None]
        return min([*left, *(s for s in (tick_seconds, self._poll) if s is not None)], default=None)

    def _restart(self) -> None:
        """Restart the children whose pause is over."""
        for child in self.children:
            if child.restart_at is not None and time.monotonic() >= child.restart_at:
                self._close(child)  # a process that it has started may still have the pipe
                try:
                    child.restart()
                except OSError as error:  # such as a limit of processes; counts as another end
                    child.last_error = f"cannot be started again: {error.strerror}"

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number not in STOP_SIGNALS:
                continue
            if self._draining:
                self._aborted_by = number
                self._abort()
            self._draining = True

    def _check_children(self) -> None:
        """Read output, handle ends of children, continue an orderly stop and enforce the deadline."""
        # In reverse: a child fails because a later one has ended more often than the other way round.
        for child in reversed(self.children):
            self._read(child)
            self._kill_if_stopped(child)
            if child.alive or child.end_expected or child.restart_at is not None or self.failure is not None:
                continue
            if child.is_trial:
                self._show(child.name, f"{child.describe_end()}; the others go on")
                child.end_expected = True
                continue
            if child.schedule_restart(time.monotonic()):  # also for streams that an orderly stop waits for
                self._show(child.name, f"{child.describe_end()}; restarting")
                continue
            self.failure = child
            self._abort()
        self._forget_retired()
        if self._draining and self.failure is None and not self._aborted_by:
            self._stop_next()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            for child in self.children:
                if child.end_expected:
                    child.signal(signal.SIGKILL)

    def _forget_retired(self) -> None:
        for child in [child for child in self.children if child.retired_at is not None]:
            if child.alive and child.retired_at is not None and time.monotonic() >= child.retired_at:
                child.process.kill()
            if not child.alive and (child.output_ended or self._stopping):
                self._close(child)
                self.children.remove(child)

    def _kill_if_stopped(self, child: Child) -> None:
        """Kill a child that was stopped for too long. The others do not wait for it any more."""
        if not child.is_stopped():
            child.stopped_at = None
            return
        child.stopped_at = child.stopped_at or time.monotonic()
        if time.monotonic() - child.stopped_at >= STOPPED_GRACE:
            child.stopped_at = None
            self._show(child.name, f"{child.name} was stopped for {STOPPED_GRACE:g} s and is killed")
            child.process.kill()

    def _read(self, child: Child) -> None:
        for line in child.lines():
            self._show(child.name, line)
        if child.output_ended:
            self._close(child)

    def _close(self, child: Child) -> None:
        """Read no more of the output of a child's process."""
        child.output_ended, pipe = True, child.process.stdout
        if pipe is not None and not pipe.closed:
            self._selector.unregister(pipe)
            pipe.close()

    def _stop_next(self) -> None:
        """Stop the first child that still runs. The first of all has no deadline, because its clients may need time."""
        for position, child in enumerate(self.children):
            if not child.alive:
                child.expect_end()  # no child before it is left that needs it
                continue
            if child is not self._stopping_child:
                self._stopping_child = child
                child.signal(signal.SIGTERM)
                self._deadline = None if position == 0 else time.monotonic() + STOP_GRACE
                if position or not self._first_needs_others:
                    for later in self.children[position + 1 :]:
                        later.expect_end()
            return

    def _abort(self) -> None:
        for child in self.children:
            for number in ABORT_SIGNALS:
                child.signal(number)
        self._deadline = time.monotonic() + ABORT_GRACE

    def _status(self) -> int:
        if self._aborted_by and self.failure is None:
            return 128 + self._aborted_by
        for child in self.children:
            ended_well = child.restart_dropped or child.process.returncode in (0, -signal.SIGTERM)
            if self.failure is None and not ended_well:
                self.failure = child
        if self.failure is None:
            return 0
        code = self.failure.process.returncode
        return code if code > 0 else 128 - code if code < 0 else 1
