"""Virtual time, and the processes and threads that live in it.

A thread is a greenlet: it runs until it waits for something, and only the hub switches between threads. So a run
depends on its seed alone. A process may be killed (its threads never run again), or stopped for a while (what happens
to it meanwhile happens when it goes on).
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from random import Random
from typing import Self

from greenlet import getcurrent, greenlet


class Killed(BaseException):
    """Raised in every thread of a process that has ended, where it waits."""


class SimulatedThread:
    """A thread of a process. It exists until its target returns or its process ends."""

    def __init__(self, process: "SimulatedProcess", target: Callable[[], object]) -> None:
        self.process, self._target = process, target
        self.ended = False
        self.ticket = 0
        """Number of the present wait: what ends an earlier one is late."""
        self.joiners = Waiters()
        self._greenlet = greenlet(self._main, process.hub.greenlet)
        process.threads.append(self)
        process.hub.after(0.0, partial(self.resume, 0, True))

    def _main(self, _: bool) -> None:
        try:
            self._target()
        except Killed:
            pass
        except BaseException as error:
            self.process.hub.failures.append(error)
            self.process.end(70)
        finally:
            self.ended = True
            self.joiners.wake()

    def resume(self, ticket: int, woken: bool) -> None:
        """End the wait with this number, in the hub."""
        if self.ended or ticket != self.ticket or not self.process.alive:
            return
        if self.process.stopped:
            self.process.held.append(partial(self.resume, ticket, woken))
            return
        self.ticket += 1
        self.process.hub.switch(self, woken)

    def wait(self, waiters: "Iterable[Waiters]", seconds: float | None) -> bool:
        """Called in this thread: wait until one of them is woken. Return False if the time has passed before.

        Raises: Killed
        """
        hub = self.process.hub
        if not self.process.alive:
            raise Killed
        for each in waiters:
            each.add(self)
        if seconds is not None:
            hub.after(max(0.0, seconds), partial(self.resume, self.ticket, False))
        woken = bool(hub.greenlet.switch())
        if not self.process.alive:
            raise Killed
        return woken

    def switch(self, woken: bool) -> None:
        self._greenlet.switch(woken)

    def reap(self) -> None:
        """Unwind the thread of a process that has ended, in the hub."""
        if self._greenlet.dead:
            return
        if self._greenlet:
            self.process.hub.within(self.process, lambda: self._greenlet.throw(Killed))
        self.ended = True


class Waiters:
    """Threads that wait for one thing."""

    def __init__(self) -> None:
        self._threads: list[tuple[SimulatedThread, int]] = []

    def add(self, thread: SimulatedThread) -> None:
        self._threads.append((thread, thread.ticket))

    def wake(self) -> None:
        threads, self._threads = self._threads, []
        for thread, ticket in threads:
            hub = thread.process.hub
            seconds = hub.latency()
            if ticket == thread.ticket:  # the others have ended their wait
                hub.after(seconds, partial(thread.resume, ticket, True))


class SimulatedProcess:
    def __init__(self, hub: "Hub", name: str) -> None:
        self.hub, self.name = hub, name
        self.alive, self.stopped = True, False
        self.status: int | None = None
        self.clock_offset = hub.rng.uniform(0.0, 1e4)
        """Seconds that its monotonic clock is ahead of the hub's: processes may run on different machines."""
        self.work = 1.0
        """Seconds of processor time that it has used."""
        self.threads: list[SimulatedThread] = []
        self.held: deque[Callable[[], None]] = deque()
        """Events that wait for the end of its stop."""
        self.on_end: list[Callable[[], None]] = []

    def start(self, target: Callable[[], object]) -> None:
        SimulatedThread(self, target)

    def do(self, action: Callable[[], None]) -> None:
        """Run a callback of this process: now, after its stop, or never."""
        if self.stopped:
            self.held.append(partial(self.do, action))
        elif self.alive:
            self.hub.within(self, action)

    def stop(self) -> None:
        """SIGSTOP."""
        if self.alive:
            self.hub.log("stopped", self.name)
            self.stopped = True

    def go_on(self) -> None:
        """SIGCONT."""
        if self.alive and self.stopped:
            self.hub.log("goes on", self.name)
        self.stopped = False
        while self.held and self.alive and not self.stopped:
            self.held.popleft()()

    def end(self, status: int) -> None:
        """The process ends now. Its threads are unwound without any effect."""
        if not self.alive:
            return
        self.hub.log("ends", self.name, status)
        self.alive, self.status = False, status
        self.hub.after(0.0, self._reap)
        for action in self.on_end:
            action()

    def _reap(self) -> None:
        for thread in self.threads:
            thread.reap()
        self.threads.clear()
        self.held.clear()


class Hub:
    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.failures: list[BaseException] = []
        """Exceptions that no process may raise, and violations found inside of processes."""
        self.process: SimulatedProcess | None = None
        """The process that runs."""
        self.thread: SimulatedThread | None = None
        """The thread that runs; None: a callback."""
        self.greenlet = getcurrent()
        """The one that switches to the others."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._trace = trace

    def log(self, *parts: object) -> None:
        if self._trace is not None:
            self._trace(f"{self.now:9.4f} " + " ".join(map(str, parts)))

    @property
    def tracing(self) -> bool:
        return self._trace is not None

    def latency(self) -> float:
        """Return the seconds that a thread waits for a processor."""
        return self.rng.choice((0.0, 0.0, 0.0, 0.0005, 0.005))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, action))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Run for so many seconds, or until a condition holds or something failed. Return whether it holds."""
        end = self.now + seconds
        while not (found := until()) and not self.failures and self._events and self._events[0][0] <= end:
            self.now, _, action = heapq.heappop(self._events)
            action()
        if self.failures:
            raise self.failures[0]
        if not found:
            self.now = end
        return found

    def within(self, process: SimulatedProcess, action: Callable[[], object]) -> None:
        """Run a callback of a process."""
        before, self.process, self.thread = (self.process, self.thread), process, None
        try:
            action()
        finally:
            self.process, self.thread = before

    def switch(self, thread: SimulatedThread, woken: bool) -> None:
        before, self.process, self.thread = (self.process, self.thread), thread.process, thread
        try:
            thread.switch(woken)
        finally:
            self.process, self.thread = before

    def wait(self, waiters: Iterable[Waiters], seconds: float | None) -> bool:
        """Let the thread that runs wait.

        Raises: Killed
        """
        if self.thread is None:  # a callback, or a thread that is unwound
            raise Killed
        return self.thread.wait(waiters, seconds)

    def monotonic(self) -> float:
        return self.now + (self.process.clock_offset if self.process is not None else 0.0)

    def sleep(self, seconds: float) -> None:
        self.wait((), seconds)

    def exit_now(self, status: int) -> None:
        """`os._exit` of the process that runs."""
        self.process.end(status)
        raise Killed


class Primitives:
    """`threading` and `queue` for one hub, as far as services use them."""

    def __init__(self, hub: Hub) -> None:
        self.Thread = partial(HubThread, hub)
        self.Event = partial(HubEvent, hub)
        self.Lock = HubLock
        self.SimpleQueue = partial(HubQueue, hub)


class HubThread:
    def __init__(self, hub: Hub, target: Callable[[], object], name: str = "", daemon: bool = False) -> None:
        assert hub.process is not None
        self._hub, self._process, self._target = hub, hub.process, target
        self._thread: SimulatedThread | None = None

    def start(self) -> None:
        self._thread = SimulatedThread(self._process, self._target)

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.ended

    def join(self, timeout: float | None = None) -> None:
        if self.is_alive():
            self._hub.wait((self._thread.joiners,), timeout)


class HubEvent:
    def __init__(self, hub: Hub) -> None:
        self._hub, self._waiters, self._is_set = hub, Waiters(), False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._waiters.wake()

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._hub.wait((self._waiters,), timeout)
        return self._is_set


class HubLock:
    """A lock that no thread holds while it waits. Two threads in it would be a bug of the simulator."""

    def __init__(self) -> None:
        self._held = False

    def __enter__(self) -> Self:
        assert not self._held
        self._held = True
        return self

    def __exit__(self, *_: object) -> None:
        self._held = False


class HubQueue:
    def __init__(self, hub: Hub) -> None:
        self._hub, self._waiters, self._items = hub, Waiters(), deque[object]()

    def put(self, item: object) -> None:
        self._items.append(item)
        self._waiters.wake()

    def qsize(self) -> int:
        return len(self._items)

    def get(self) -> object:
        while not self._items:
            self._hub.wait((self._waiters,), None)
        return self._items.popleft()
