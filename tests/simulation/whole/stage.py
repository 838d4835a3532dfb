"""The compute stage of a simulated rank: steps one after another in virtual time, and the masks that they wait for.

As on the native backend, the rank that samples decides which rows are left out, and the others follow.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from protocol.codec import Decoder, unpack
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
class Outcomes:
    """The masks that steps of an epoch were sampled with: messages of the rank that samples to the others."""

    sent: dict[int, SentMasks] = field(default_factory=dict)
    """By step id; only of steps with masked rows."""
    arrived: Waiters = field(default_factory=Waiters)
    broken: bool = False
    """True: a rank is gone."""


class RankOracle(OracleWorker):
    """The oracle of one rank.

    Args:
        decides: True: this rank decides which rows are left out. False: it samples as `outcomes` say.
    """

    def __init__(self, outcomes: Outcomes, decides: bool, *args: Any) -> None:
        super().__init__(*args)
        self._outcomes, self.decides = outcomes, decides

    def follow(self) -> list[bytes]:
        """Sample the steps whose outcomes have arrived. Return results as `receive` does."""
        return self._run()

    def _sent(self, step: DeferredStep, leaves_out: bool) -> SentMasks | None:
        if not self.decides and step.masked:
            return self._outcomes.sent.get(step.plan.step_id)
        sent = super()._sent(step, leaves_out)
        if sent is not None and step.masked:
            self._outcomes.sent[step.plan.step_id] = sent
            self._outcomes.arrived.wake()
        return sent

    def _known_for(self, plan: SchedulerOutput, confirmed: int) -> int:
        """Return the step for which all rows start where they must. If there is none, the oracle finds the violation.
        Rows that enter say nothing."""
        entering = {new.slot for new in plan.new}
        starts = zip(unpack(plan.slots).tolist(), unpack(plan.starts).tolist(), strict=True)
        rows = [
            (self.slots[slot], start) for slot, start in starts if slot in self.slots and slot not in entering
        ]
        for known in range(plan.step_id - 1, max(-1, plan.step_id - 2 - MAX_DEPTH), -1):
            if all(
                row.computed is None or start == row.computed + sum(n for k, n in row.rejected if k > known)
                for row, start in rows
            ):
                return known
        return plan.step_id - 1


class ComputeStage:
    """The steps of one epoch on one rank. `receive` belongs to the main thread, `result` to the output thread."""

    def __init__(self, hub: Hub, oracle: RankOracle, outcomes: Outcomes, happened: Counter[str]) -> None:
        self._hub, self._outcomes, self._happened = hub, outcomes, happened
        self.oracle = oracle
        self._results: dict[int, bytes] = {}
        """Step id -> result that was not fetched."""
        self._changed = Waiters()
        self._sampled = 0.0
        """When the last step was sampled."""
        self._ended = False

    def receive(self, frame: bytes) -> None:
        """Process a plan, masks or released slots."""
        self._take(lambda: self.oracle.receive(frame))
        self._changed.wake()

    def end(self) -> None:
        """The epoch is over: waits end with RanksLost."""
        self._ended = True
        self._changed.wake()

    def result(self, step_id: int, launched: float, seconds: float) -> bytes:
        """Compute a step, from its launch on or when the step before it was sampled. Return its result.

        Raises: RanksLost
        """
        hub, end = self._hub, max(launched, self._sampled) + seconds
        if end > hub.now:
            hub.sleep(end - hub.now)
        if step_id not in self._results:
            self._wait(step_id)
            end = hub.now
        self._sampled = end
        return self._results.pop(step_id)

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
            elif self._outcomes.broken or hub.now >= until:
                raise RanksLost("another rank does not answer")
            else:
                self._take(oracle.follow)
                if step_id not in self._results:
                    hub.wait((self._changed, self._outcomes.arrived), until - hub.now)

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

    stage: ComputeStage
    step_id: int
    launched: float
    """Time of the launch, virtual seconds."""
    seconds: float
    """Duration of the forward pass."""
    is_output: bool
    """True: this rank returns the result."""

    def get(self) -> ModelRunnerOutput | StepTimes:
        result = self.stage.result(self.step_id, self.launched, self.seconds)
        return _RESULTS.decode(result) if self.is_output else StepTimes()


class CanaryOutput:
    """An `Output` of the canary step."""

    def get(self) -> ModelRunnerOutput | StepTimes:
        return StepTimes()
