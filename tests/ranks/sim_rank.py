"""One rank of a simulated group as a process: it executes its parent's requests one after the other.

Only `abort` overtakes: it is called from a second thread while the first one may wait for another rank.
"""

import queue
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from protocol.codec import Decoder
from protocol.membership import Assignment, InitializeCache
from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepTimes
from services.config import WorkerConfig
from services.worker.backends.sim import SimRunner
from services.worker.backends.sim.device.simulated import SimDevice
from services.worker.backends.sim.ranks.group_exchange import GroupExchange
from services.worker.distributed import rendezvous
from services.worker.distributed.messages import Tag
from services.worker.runner import Output
from tests.unit.worker.virtual_clock import VirtualClock

START = 100.0
"""Seconds: the time at which a virtual clock begins."""


class SimRank:
    """The public methods are the requests of the parent."""

    def __init__(self) -> None:
        self._runner: SimRunner | None = None
        self._listener: socket.socket | None = None
        self._outputs: list[Output] = []
        self._results: deque[Future[ModelRunnerOutput | StepTimes]] = deque()
        """Results of launched steps, in order."""
        self._output_thread = ThreadPoolExecutor(1)
        self._plans: Decoder[SchedulerOutput | GrammarOutput] = Decoder(SchedulerOutput | GrammarOutput)

    @property
    def runner(self) -> SimRunner:
        assert self._runner is not None, "`start` comes first"
        return self._runner

    def start(self, config: dict[str, Any], virtual: bool) -> None:
        """Make a runner, on a virtual clock if `virtual`."""
        clock = VirtualClock(START)
        device = (lambda: SimDevice(clock)) if virtual else SimDevice
        self._runner = SimRunner(WorkerConfig(backend="sim", **config), device, full_check=True)

    def listen(self) -> str:
        self._listener = rendezvous.listen("127.0.0.1")
        return "{}:{}".format(*self._listener.getsockname()[:2])

    def load(self, assignment: Assignment, init: InitializeCache) -> None:
        listener, self._listener = self._listener, None
        self.runner.load(assignment, lambda *_: None, listener)
        self.runner.init_kv_cache(init)

    def execute(self, plan: bytes) -> None:
        step = self._plans.decode(plan)
        assert isinstance(step, SchedulerOutput)
        self.runner.execute_model(step)

    def sample(self, grammar: bytes | None) -> None:
        decoded = self._plans.decode(grammar) if grammar else None
        assert not isinstance(decoded, SchedulerOutput)
        self._outputs.append(self.runner.sample_tokens(decoded))

    def results(self) -> list[ModelRunnerOutput | StepTimes]:
        """Return the results of all steps since the last call."""
        outputs, self._outputs = self._outputs, []
        return [output.get() for output in outputs]

    def launch(self, plan: bytes) -> None:
        """Execute and sample a step; another thread waits for its result and its masks."""
        self.execute(plan)
        self._results.append(self._output_thread.submit(self.runner.sample_tokens(None).get))

    def add_masks(self, grammar: bytes) -> None:
        decoded = self._plans.decode(grammar)
        assert isinstance(decoded, GrammarOutput)
        self.runner.add_masks(decoded)

    def ended(self) -> bool:
        """Return whether the oldest launched step has ended."""
        return self._results[0].done()

    def result(self) -> ModelRunnerOutput | StepTimes:
        """Return the result of the oldest launched step, and forget it."""
        return self._results.popleft().result()

    def release(self, slots: list[int]) -> None:
        self.runner.release(np.array(slots, np.int32))

    def leave(self) -> None:
        self._outputs.clear()
        self.runner.leave()

    def abort(self) -> None:
        if self._runner is not None:
            self._runner.abort()

    def num_expected_feedback(self) -> int:
        """Return the number of messages that this stage expects and has not received."""
        return len(self._exchange.expected)

    def num_kept_activations(self) -> int:
        """Return the number of messages that are kept because they may not have left."""
        return self._exchange.pipeline.num_kept(Tag.ACTIVATIONS)

    @property
    def _exchange(self) -> GroupExchange:
        exchange = self.runner.exchange
        assert isinstance(exchange, GroupExchange)
        return exchange

    # -- faults --------------------------------------------------------------------------------------------------

    def change_draft(self, slot: int) -> None:
        """This rank's drafter has proposed another first draft."""
        self.runner.epoch.drafts.tokens[slot, 0] += 1

    def drop_feedback(self) -> None:
        """The next message to the first stage is never sent."""
        pipeline, send = self._exchange.pipeline, self._exchange.pipeline.send_feedback

        def drop(message: torch.Tensor) -> None:
            pipeline.send_feedback = send  # type: ignore[method-assign]  # the fault is over

        pipeline.send_feedback = drop  # type: ignore[method-assign]  # the fault

    def repeat_activations(self) -> None:
        """From the step after the next one on, each step sends the activations of the step before."""
        pipeline, send = self._exchange.pipeline, self._exchange.pipeline.send_activations
        sent: list[torch.Tensor] = []

        def stale(message: torch.Tensor) -> None:
            sent.append(message)
            send(sent[max(0, len(sent) - 2)])

        pipeline.send_activations = stale  # type: ignore[method-assign, assignment]  # the fault

    def swap(self, method: str, i: int, j: int) -> None:
        """Two words of the next message that `method` of the pipeline group sends are swapped."""

        def change(message: torch.Tensor) -> None:
            message[[i, j]] = message[[j, i]]

        self._edit(method, change)

    def shift(self, method: str, i: int, by: int) -> None:
        """One word of the next message that `method` of the pipeline group sends is changed."""

        def change(message: torch.Tensor) -> None:
            message[i] += by

        self._edit(method, change)

    def _edit(self, method: str, change: Callable[[torch.Tensor], None]) -> None:
        pipeline = self._exchange.pipeline
        send = getattr(pipeline, method)

        def edited(message: torch.Tensor) -> None:
            setattr(pipeline, method, send)
            change(message)
            send(message)

        setattr(pipeline, method, edited)


STEP = ("execute", "sample", "results")


def serve(connection: Connection) -> None:
    """Answer each request (method, arguments) with ("ok", value) or (type of the exception, its text).

    As in a worker, nothing is executed after a failure: each step fails in the same way until the next `load`.
    """
    torch.set_num_threads(1)
    rank = SimRank()
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
