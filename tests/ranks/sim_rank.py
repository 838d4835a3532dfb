"""A simulated rank in a process (tests.ranks.process): the commands that only it has, and its faults.

A payload of several values is a list.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import torch

from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepTimes
from services.config import WorkerConfig
from services.worker.backends.sim import SimRunner
from services.worker.backends.sim.device.simulated import SimDevice
from services.worker.backends.sim.ranks.group_exchange import GroupExchange
from services.worker.distributed.messages import Tag
from tests.ranks.process import ServedRank, serve
from tests.unit.worker.virtual_clock import VirtualClock

START = 100.0
"""Seconds: the time at which a virtual clock begins."""
STEP = ("execute", "sample", "results")


class SimRank(ServedRank):
    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self._failure: tuple[object, ...] | None = None
        self._results: deque[Future[ModelRunnerOutput | StepTimes]] = deque()
        """Results of launched steps, in order. A thread waits for them and for their masks."""
        self._output_thread = ThreadPoolExecutor(1)

    def answer(self, name: str, payload: Any) -> tuple[object, ...]:
        """As in a worker, nothing is executed after a failure: each step fails likewise until the next `load`."""
        if name == "load":
            self._failure = None
        if self._failure is not None and name in STEP:
            return self._failure
        answer = super().answer(name, payload)
        if not answer[0]:
            self._failure = answer
        return answer

    def open(self, settings: tuple[dict[str, Any], bool]) -> None:
        """Make a runner, on a virtual clock if the second value is True."""
        config, virtual = settings
        clock = VirtualClock(START)
        device = (lambda: SimDevice(clock)) if virtual else SimDevice
        self.runner = SimRunner(WorkerConfig(backend="sim", **config), device, full_check=True)

    def execute(self, step: bytes) -> None:
        self.runner.execute_model(msgspec.msgpack.decode(step, type=SchedulerOutput))

    def sample(self, grammar: bytes | None) -> None:
        if grammar is not None:
            self.runner.add_masks(msgspec.msgpack.decode(grammar, type=GrammarOutput))
        self.outputs.append(self.runner.sample_tokens(None))

    def results(self, _: None) -> list[bytes]:
        """Return the results of all steps since the last call; `StepTimes` on a rank that is not the output rank."""
        outputs, self.outputs = self.outputs, deque()
        return [msgspec.msgpack.encode(output.get()) for output in outputs]

    def launch(self, step: bytes) -> None:
        self.execute(step)
        self._results.append(self._output_thread.submit(self.runner.sample_tokens(None).get))

    def ended(self, _: None) -> bool:
        return self._results[0].done()

    def result(self, _: None) -> bytes:
        return msgspec.msgpack.encode(self._results.popleft().result())

    def leave(self, _: None) -> None:
        self.outputs.clear()
        super().leave(_)

    def num_expected_feedback(self, _: None) -> int:
        """Return the number of messages that this stage expects and has not received."""
        return len(self._exchange.feedback.awaited)

    def num_kept_activations(self, _: None) -> int:
        """Return the number of messages that are kept because they may not have left."""
        return self._exchange.ranks.pipeline.num_kept(Tag.ACTIVATIONS)

    @property
    def _exchange(self) -> GroupExchange:
        assert isinstance(self.runner, SimRunner)
        assert isinstance(self.runner.exchange, GroupExchange)
        return self.runner.exchange

    # -- faults --------------------------------------------------------------------------------------------------

    def change_draft(self, slot: int) -> None:
        """This rank's drafter has proposed another first draft."""
        assert isinstance(self.runner, SimRunner)
        self.runner.epoch.drafts.tokens[slot, 0] += 1

    def drop_feedback(self, _: None) -> None:
        """The next message to the first stage is never sent."""
        pipeline, send = self._exchange.ranks.pipeline, self._exchange.ranks.pipeline.send_feedback

        def drop(message: torch.Tensor) -> None:
            pipeline.send_feedback = send  # type: ignore[method-assign]  # the fault is over

        pipeline.send_feedback = drop  # type: ignore[method-assign]  # the fault

    def repeat_activations(self, _: None) -> None:
        """From the step after the next one on, each step sends the activations of the step before."""
        pipeline, send = self._exchange.ranks.pipeline, self._exchange.ranks.pipeline.send_activations
        sent: list[torch.Tensor] = []

        def stale(message: torch.Tensor) -> None:
            sent.append(message)
            send(sent[max(0, len(sent) - 2)])

        pipeline.send_activations = stale  # type: ignore[method-assign, assignment]  # the fault

    def swap(self, words: tuple[str, int, int]) -> None:
        """Two words of the next message that a method of the pipeline group sends are swapped."""
        method, i, j = words

        def change(message: torch.Tensor) -> None:
            message[[i, j]] = message[[j, i]]

        self._edit(method, change)

    def shift(self, word: tuple[str, int, int]) -> None:
        """One word of the next message that a method of the pipeline group sends is changed."""
        method, i, by = word

        def change(message: torch.Tensor) -> None:
            message[i] += by

        self._edit(method, change)

    def _edit(self, method: str, change: Callable[[torch.Tensor], None]) -> None:
        pipeline = self._exchange.ranks.pipeline
        send = getattr(pipeline, method)

        def edited(message: torch.Tensor) -> None:
            setattr(pipeline, method, send)
            change(message)
            send(message)

        setattr(pipeline, method, edited)


def main() -> None:
    serve(SimRank())
