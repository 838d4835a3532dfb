"""Steps of a runner that computes on the thread that reads messages, and therefore cannot wait for masks itself.

A step with constrained rows waits here between its forward pass and its sampling: until its masks are complete, or
until it holds back another request (left-out row, docs/invariants.md). Everything else that arrives meanwhile waits
behind it, in order.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from protocol.codec import unpack
from protocol.steps import GrammarOutput, KeepPins, LoadBlocks, ReleaseSlots, SchedulerOutput
from services.worker.backends.clock import MONOTONIC, Clock
from services.worker.backends.mask_inbox import KEPT_STEPS, Forward, MaskInbox, joined
from services.worker.session import ResendResult, StepAction


@dataclass(frozen=True)
class SampleStep:
    """Sample the executed step with its grammar; None: all constrained rows are left out."""

    grammar: GrammarOutput | None
    step: SchedulerOutput


class QueuedAction(NamedTuple):
    action: SchedulerOutput | SampleStep | ResendResult | ReleaseSlots | LoadBlocks | KeepPins
    received: float
    """When its message was read: seconds on the monotonic clock. That of the plan for a `SampleStep`."""


class StepQueue:
    """The actions of one epoch, without I/O."""

    def __init__(self, clock: Clock = MONOTONIC) -> None:
        self._clock = clock
        self._masks = MaskInbox(KEPT_STEPS, clock)  # the thread that reads masks waits for no step
        self._behind: deque[QueuedAction] = deque()
        self._executed: QueuedAction | None = None
        """The step that waits for its masks."""
        self._began = 0.0
        self._forward: Forward | None = None
        """The forward pass of the step that waits, once it has ended."""
        self._limit = math.inf

    @property
    def seconds_left(self) -> float:
        """Seconds until `next` is to be called although no message arrives; inf: there is no such time."""
        return math.inf if self._executed is None else max(0.0, self._limit - self._clock.monotonic())

    @property
    def waits(self) -> bool:
        """True: a step was executed and is not sampled yet."""
        return self._executed is not None

    def put(self, action: StepAction, received: float) -> None:
        if isinstance(action, GrammarOutput):
            self._masks.put(action)
            return
        if isinstance(action, SchedulerOutput):
            self._masks.prepared(action.step_id, unpack(action.slots))
        self._behind.append(QueuedAction(action, received))

    def next(self) -> QueuedAction | None:
        """Return the action to execute next; None: there is none, or a step waits for its masks.

        While a step waits, call it only when all messages that have arrived were put: masks among them are used.
        """
        if self._executed is not None:
            return self._sampling(self._executed)
        if not self._behind:
            return None
        queued = self._behind.popleft()
        if isinstance(queued.action, SchedulerOutput) and queued.action.has_structured_output_requests:
            self._executed, self._forward, self._limit = queued, None, math.inf
            self._began = self._clock.monotonic()
        return queued

    def _sampling(self, executed: QueuedAction) -> QueuedAction | None:
        step = executed.action
        assert isinstance(step, SchedulerOutput)
        self._forward = self._forward or Forward(self._began, self._clock.monotonic())
        taken = self._masks.poll(step.step_id, unpack(step.masked), self._forward)
        if isinstance(taken, float):
            self._limit = taken
            return None
        self._executed = None
        return QueuedAction(SampleStep(joined(taken.parts), step), executed.received)
