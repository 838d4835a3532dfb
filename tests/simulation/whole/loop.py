"""An asyncio event loop on virtual time. It runs one turn whenever something is due."""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

from tests.simulation.whole.hub import SimulatedProcess
from tests.simulation.whole.network import SimulatedNetwork

UNWINDING = 4
"""Turns in which the tasks of a process that has ended unwind."""


class _NothingReady(selectors.SelectSelector):
    def select(self, timeout: float | None = None) -> list[Any]:
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, network: SimulatedNetwork, process: SimulatedProcess) -> None:
        self._network, self._process, self._hub = network, process, network.hub
        self._is_due = False
        super().__init__(_NothingReady())
        self.set_exception_handler(self._on_exception)
        process.on_end.append(lambda: self._hub.after(0.0, self._unwind))

    def time(self) -> float:
        return self._hub.now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        self._wake()
        return super().call_soon(callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        self._hub.after(max(0.0, when - self._hub.now), self._wake)
        return super().call_at(when, callback, *args, context=context)

    def add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        socket = self._network.sockets[fd]
        socket.listener = lambda: self.call_soon(callback, *args)
        if socket.inbox:
            socket.listener()

    def remove_reader(self, fd: int) -> bool:
        if fd in self._network.sockets:
            self._network.sockets[fd].listener = None
        return True

    def _wake(self) -> None:
        if not self._is_due and self._process.alive:
            self._is_due = True
            self._hub.after(self._hub.latency(), lambda: self._process.do(self._turn))

    def _turn(self) -> None:
        self._is_due = False
        self.stop()
        self.run_forever()

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if self._process.alive:
            error = context.get("exception") or RuntimeError(context["message"])
            self._hub.failures.append(error)

    def _unwind(self) -> None:
        """The process has ended: its tasks end without any effect."""
        for task in asyncio.all_tasks(self):
            task.cancel()
        for _ in range(UNWINDING):
            self._hub.within(self._process, self._turn)
        self.close()
