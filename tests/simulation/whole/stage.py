"""The compute stage of a simulated rank: steps one after another in virtual time, and what they wait for.

A step waits for the activations of the pipeline stage before, on the first stage for the tokens that the last one has
sampled, and for masks. As on the native backend, the rank that samples decides which rows are left out, and the others
follow.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from protocol.codec import Decoder, unpack
from protocol.membership import Assignment
from protocol.steps import ModelRunnerOutput, SchedulerOutput, StepTimes
from services.worker.runner import RanksLost
from tests.simulation.oracle import DeferredStep, OracleViolation, OracleWorker, SentMasks
from tests.simulation.whole.hub import Hub, Waiters

JOIN_TIMEOUT = 20.0
"""Seconds after which an operation that lacks a rank fails."""
MAX_DEPTH = 8
"""Steps in flight at most."""
_RESULTS: Decoder[ModelRunnerOutput] = Decoder(ModelRunnerOutput)


@dataclass
class RankMessages:
    """Messages between the ranks of an epoch."""

    sent: dict[int, SentMasks] = field(default_factory=dict)
    """The masks that steps were sampled with, by step id; only of steps with masked rows."""
    passed: Counter[int] = field(default_factory=Counter)
    """Rank -> the last step whose forward pass it has ended."""
    sampled: int = 0
    """The last step whose tokens the rank that samples has sent."""
    arrived: Waiters = field(default_factory=Waiters)
    broken: bool = False
    """True: a rank is gone."""


class RankOracle(OracleWorker):
    """The oracle of one rank.

    Args:
        decides: True: this rank decides which rows are left out. False: it samples as `messages` say.
    """

    def __init__(self, messages: RankMessages, decides: bool, *args: Any) -> None:
        super().__init__(*args)
        self._messages, self.decides = messages, decides

    def receive(self, frame: bytes) -> list[bytes]:
        self.confirmed = self._messages.sampled
        return super().receive(frame)

    def follow(self) -> list[bytes]:
        """Sample the steps whose masks are decided. Return results as `receive` does."""
        return self._run()

    def _sent(self, step: DeferredStep, leaves_out: bool) -> SentMasks | None:
        if not self.decides and step.masked:
            return self._messages.sent.get(step.plan.step_id)
        sent = super()._sent(step, leaves_out)
        if sent is not None and step.masked:
            self._messages.sent[step.plan.step_id] = sent
            self._messages.arrived.wake()
        return sent

    def _known_for(self, plan: SchedulerOutput, confirmed: int) -> int:
        """Return the last step up to `confirmed` for which all rows start where they must. If there is none, the oracle
        finds the violation. Rows that enter say nothing."""
        entering = {new.slot for new in plan.new}
        starts = zip(unpack(plan.slots).tolist(), unpack(plan.starts).tolist(), strict=True)
        rows = [(self.slots[slot], start) for slot, start in starts if slot in self.slots and slot not in entering]
        for known in range(confirmed, max(-1, plan.step_id - 2 - MAX_DEPTH), -1):
            if all(
                row.computed is None or start == row.computed + sum(n for k, n in row.rejected if k > known)
                for row, start in rows
            ):
                return known
        return confirmed


class ComputeStage:
    """The steps of one epoch on one rank. `receive` belongs to the main thread, `result` to the output thread."""

    def __init__(
        self, hub: Hub, oracle: RankOracle, messages: RankMessages, assignment: Assignment, happened: Counter[str]
    ) -> None:
        self._hub, self._messages, self._happened = hub, messages, happened
        self.oracle = oracle
        a = assignment
        self._rank, self.is_output = a.rank, a.rank == a.output_rank
        self._before = a.rank - a.tensor_parallel_size if a.rank >= a.tensor_parallel_size else None
        """The rank that sends activations to this one; None: this is the first stage."""
        self._is_pipeline = a.pipeline_parallel_size > 1
        self._results: dict[int, bytes] = {}
        """Step id -> result that was not fetched."""
        self._changed = Waiters()
        self._sampled = 0.0
        """When the last step was sampled."""
        self._ended = False
        self.last_whole = 0
        """The last step that this rank has computed to its end."""

    def receive(self, frame: bytes) -> None:
        """Process a plan, masks or released slots."""
        self._take(lambda: self.oracle.receive(frame))
        self._changed.wake()

    def content(self, block: int) -> list[int | None]:
        """Return what a reader beside the steps sees of a block. All ranks have written those of a step that was
        sampled."""
        self.oracle.executed = max(self.last_whole, self._messages.sampled)
        return self.oracle.content(block)

    def end(self) -> None:
        """The epoch is over: waits end with RanksLost."""
        self._ended = True
        self._changed.wake()

    def result(self, step_id: int, launched: float, seconds: float) -> bytes:
        """Compute a step: from its launch on, when the step before it was sampled and its inputs have arrived. Return
        its result.

        Raises: RanksLost
        """
        hub, messages = self._hub, self._messages
        began = max(launched, self._sampled)
        if not self._has_inputs(step_id):
            self._wait_for_inputs(step_id)
            began = hub.now
        end = began + seconds
        if end > hub.now:
            hub.sleep(end - hub.now)
        messages.passed[self._rank] = step_id
        self.last_whole = self.last_whole if self.is_output else step_id
        if self._is_pipeline:
            messages.arrived.wake()
        if step_id not in self._results:
            self._wait(step_id)
            end = hub.now
        self._sampled = end
        if self.is_output:
            messages.sampled = self.last_whole = step_id
            if self._is_pipeline:
                messages.arrived.wake()
        return self._results.pop(step_id)

    def _has_inputs(self, step_id: int) -> bool:
        if self._before is not None:
            return self._messages.passed[self._before] >= step_id
        entered = self.oracle.entered  # a plan waits there until the step before it is sampled
        return not self._is_pipeline or (len(entered) >= step_id and self._messages.sampled >= entered[step_id - 1])

    def _wait_for_inputs(self, step_id: int) -> None:
        """Raises: RanksLost"""
        until = self._hub.now + JOIN_TIMEOUT
        while not self._has_inputs(step_id):
            if self._ended:
                raise RanksLost("the epoch has ended")
            self._wait_for_ranks(until)

    def _wait_for_ranks(self, until: float) -> None:
        """Wait for a message of another rank. Raises: RanksLost"""
        if self._messages.broken or self._hub.now >= until:
            raise RanksLost("another rank does not answer")
        self._hub.wait((self._changed, self._messages.arrived), until - self._hub.now)

    def _wait(self, step_id: int) -> None:
        """The forward pass has ended: wait for masks, or for the rank that samples.

        Raises: RanksLost
        """
        hub, oracle, until = self._hub, self.oracle, self._hub.now + JOIN_TIMEOUT
        while step_id not in self._results:
            if self._ended:
                raise RanksLost("the epoch has ended")
            if oracle.decides and oracle.holds_back:
                self._happened["steps sampled without rows"] += 1
                self._take(oracle.leave_out)
            elif oracle.decides:
                hub.wait((self._changed,), None)
            else:
                self._take(oracle.follow)
                if step_id not in self._results:
                    self._wait_for_ranks(until)

    def _take(self, run: Callable[[], list[bytes]]) -> None:
        try:
            for result in run():
                self._results[_RESULTS.decode(result).step_id] = result
        except OracleViolation as error:
            self._hub.failures.append(error)  # the worker reports it as a fault of the step, and recovers
            raise


@dataclass(frozen=True)
class StageOutput:
    """An `Output` of a step."""

    is_done = False
    stage: ComputeStage
    step_id: int
    launched: float
    """Time of the launch, virtual seconds."""
    seconds: float
    """Duration of the forward pass."""
    is_poisoned: bool = False
    """The forward pass fails."""

    def get(self) -> ModelRunnerOutput | StepTimes:
        if self.is_poisoned:
            raise RuntimeError("a kernel of this step failed")
        result = self.stage.result(self.step_id, self.launched, self.seconds)
        return _RESULTS.decode(result) if self.stage.is_output else StepTimes()


class CanaryOutput:
    """An `Output` of the canary step."""

    is_done = True

    def get(self) -> ModelRunnerOutput | StepTimes:
        return StepTimes()
