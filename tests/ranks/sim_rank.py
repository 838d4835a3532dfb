"""One rank of a simulated group as a process: does what its parent says, one thing after the other.

Only `abort` overtakes: it is called from a second thread while the first may wait for another rank.
"""

import queue
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from protocol.codec import Decoder
from protocol.membership import Assignment, InitializeCache
from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepTimes
from services.config import WorkerConfig
from services.worker.backends.sim import SimRunner
from services.worker.backends.sim import device as sim_device
from services.worker.distributed import rendezvous
from services.worker.runner import Output

START = 100.0
"""Seconds: when a frozen clock stands still."""


class FrozenClock:
    """A VIRTUAL clock in place of the simulated device's: it stands still until an event is waited for."""

    def __init__(self) -> None:
        self.now = START

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Rank:
    """Its public methods are what the parent can ask for."""

    def __init__(self) -> None:
        self._runner: SimRunner | None = None
        self._listener: socket.socket | None = None
        self._outputs: list[Output] = []
        self._plans: Decoder[SchedulerOutput | GrammarOutput] = Decoder(SchedulerOutput | GrammarOutput)

    def start(self, config: dict[str, Any], frozen: bool) -> None:
        """A runner, as in a process of its own; `frozen`: on a virtual clock."""
        sim_device.time = FrozenClock() if frozen else time  # type: ignore[assignment]
        self._runner = SimRunner(WorkerConfig(backend="sim", **config), full_check=True)

    def listen(self) -> str:
        self._listener = rendezvous.listen("127.0.0.1")
        return "{}:{}".format(*self._listener.getsockname()[:2])

    def load(self, assignment: Assignment, init: InitializeCache) -> None:
        listener, self._listener = self._listener, None
        self._runner.load(assignment, lambda *_: None, listener)
        self._runner.init_kv_cache(init)

    def execute(self, plan: bytes) -> None:
        self._runner.execute_model(self._plans.decode(plan))  # type: ignore[arg-type]

    def sample(self, grammar: bytes | None) -> None:
        decoded = self._plans.decode(grammar) if grammar else None
        self._outputs.append(self._runner.sample_tokens(decoded))  # type: ignore[arg-type]

    def results(self) -> list[ModelRunnerOutput | StepTimes]:
        """Of all steps since the last call."""
        outputs, self._outputs = self._outputs, []
        return [output.get() for output in outputs]

    def release(self, slots: list[int]) -> None:
        self._runner.release(np.array(slots, np.int32))

    def leave(self) -> None:
        self._outputs.clear()
        self._runner.leave()

    def abort(self) -> None:
        if self._runner is not None:
            self._runner.abort()

    def waiting_feedback(self) -> int:
        """Messages that were promised to this stage and not taken."""
        return len(self._stage._promised)

    def on_their_way(self) -> list[int]:
        """Messages kept because they may not have left: activations, feedback."""
        return [len(leaving) for leaving in self._stage._stages._leaving]

    # -- mutations -----------------------------------------------------------------------------------------------

    def another_draft(self, slot: int) -> None:
        """The drafter of this rank has come to something else."""
        self._runner._drafts._tokens[slot, 0] += 1

    @property
    def _stage(self) -> Any:
        return self._runner._place

    def drop_feedback(self) -> None:
        """The next message to the first stage is never sent."""
        stages, send = self._stage._stages, self._stage._stages.send_first

        def drop(message: torch.Tensor) -> None:
            stages.send_first = send

        stages.send_first = drop

    def repeat_activations(self) -> None:
        """From the next but one step on, the next stage gets those of the step before."""
        stages, send = self._stage._stages, self._stage._stages.send_next
        kept: list[torch.Tensor] = []

        def stale(message: torch.Tensor) -> None:
            kept.append(message)
            send(kept[max(0, len(kept) - 2)])

        stages.send_next = stale

    def swap(self, method: str, i: int, j: int) -> None:
        """Two words of the next message that leaves by `method` change places."""

        def change(message: torch.Tensor) -> None:
            message[[i, j]] = message[[j, i]]

        self._edit(method, change)

    def shift(self, method: str, i: int, by: int) -> None:
        """One word of the next message that leaves by `method` is another one."""

        def change(message: torch.Tensor) -> None:
            message[i] += by

        self._edit(method, change)

    def _edit(self, method: str, change: Callable[[torch.Tensor], None]) -> None:
        stages, send = self._stage._stages, getattr(self._stage._stages, method)

        def edited(message: torch.Tensor) -> None:
            setattr(stages, method, send)
            change(message)
            send(message)

        setattr(stages, method, edited)


STEP = ("execute", "sample", "results")


def serve(connection: Connection) -> None:
    """Answers each request (method, arguments) with ("ok", value) or (type of the exception, its text).

    As in a worker, nothing is executed after a failure: each step ends with what failed, until the next `load`.
    """
    torch.set_num_threads(1)
    rank = Rank()
    requests: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()

    def work() -> None:
        failure = None
        while (request := requests.get()) is not None:
            method, arguments = request
            failure = None if method == "load" else failure
            answer: tuple[str, Any] = failure or ("ok", None)
            if failure is None or method not in STEP:
                try:
                    answer = ("ok", getattr(rank, method)(*arguments))
                except Exception as error:
                    answer = failure = (type(error).__name__, str(error))
            connection.send(answer)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    while (message := _next(connection)) is not None:
        if message[0] == "abort":
            rank.abort()
        else:
            requests.put(message)
    rank.abort()
    requests.put(None)
    worker.join()


def _next(connection: Connection) -> tuple[str, tuple[Any, ...]] | None:
    try:
        return connection.recv()
    except EOFError:
        return None
