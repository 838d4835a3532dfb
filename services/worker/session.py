"""A worker's states without I/O: messages of the scheduler in, actions out.

    REGISTERED   ── Assignment ──►       LOADING       (weights; ends with `loaded`)
    LOADED       ── InitializeCache ──►  INITIALIZING  (cache and canary step; ends with `ready`)
    any          ── ranks_lost ──►       RANKS_LOST    (another rank is gone; waits for the end of the epoch)
    any          ── EndEpoch ──►         REGISTERED    (the worker registers again)
    any          ── Shutdown ──►         LEAVING
    any          ── failed ──►           FAILED        (nothing more is executed)
    any          ── reconnected ──►      REGISTERED    (to another scheduler, whose epochs are later)

The masks of a step come in any number of messages behind its plan. The runner waits for them, or `StepQueue` does. A
worker that leaves no row out (left-out row; docs/invariants.md) gets all of them in one message, before the next plan.

Steps are executed in order, each exactly once (step order; docs/invariants.md): the next step is executed, the kept
result of a repeated step is sent again, and a gap is a fault. Messages of another epoch, and assignments to an epoch
that is not later than the last one (incarnation; docs/invariants.md), are ignored. Only a drop reaches a worker without
an epoch, too. A message that is not allowed in the current phase raises `ProtocolError` and changes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

from protocol.codec import ProtocolError
from protocol.membership import Assignment, EndEpoch, GroupMessage, InitializeCache, Ping, Shutdown
from protocol.steps import GrammarOutput, KeepPins, LoadBlocks, ReleaseSlots, SchedulerOutput, StepFault, StepMessage


class Phase(Enum):
    REGISTERED = auto()
    LOADING = auto()
    LOADED = auto()
    INITIALIZING = auto()
    SERVING = auto()
    RANKS_LOST = auto()
    LEAVING = auto()
    FAILED = auto()


@dataclass(frozen=True)
class ResendResult:
    """Send the kept result of a repeated step again."""

    step_id: int


StepAction = SchedulerOutput | GrammarOutput | ResendResult | ReleaseSlots | LoadBlocks | KeepPins
"""A message is the action that it names. `SchedulerOutput`: launch the next step. `GrammarOutput`: masks of a step that
was launched, perhaps sampled without them."""
Action = Assignment | InitializeCache | EndEpoch | Ping | Shutdown | StepAction | StepFault
"""A message of the group is the action that it names. A `StepFault` is sent to the scheduler, then the worker
leaves."""


class Session:
    def __init__(self) -> None:
        self.phase = Phase.REGISTERED
        self.epoch = 0
        self.last_step = 0
        """The last step that was returned for execution."""
        self._last_ticket = 0
        """The last load of this epoch."""
        self.returns = False
        """A scheduler was lost since the last assignment."""
        self.leaves_rows_out = False
        """True: the masks of a step may come behind later plans, unless the scheduler samples whole steps."""
        self._whole_steps = False
        self._unmasked = 0
        """The step whose masks must arrive before the next plan; 0: there is none."""
        self.collects_masks = False
        """True: the actions of steps pass through a `StepQueue`, because the runner does not wait for masks."""

    # -- events of the worker itself -----------------------------------------------------------------------------

    def loaded(self) -> None:
        self._move(Phase.LOADING, Phase.LOADED)

    def ready(self) -> None:
        self._move(Phase.INITIALIZING, Phase.SERVING)

    def ranks_lost(self) -> None:
        """Another rank is gone: ignore every message until the end of the epoch."""
        self.phase = Phase.RANKS_LOST

    def reconnected(self) -> None:
        """The scheduler was lost and another one may have taken its place: its next assignment begins a later epoch."""
        self.phase = Phase.REGISTERED
        self.returns = True

    def failed(self) -> None:
        """A step failed: execute nothing more."""
        self.phase = Phase.FAILED

    def _move(self, before: Phase, after: Phase) -> None:
        if self.phase is not before:
            raise ProtocolError(f"{after.name} cannot follow {self.phase.name}")
        self.phase = after

    # -- messages of the scheduler -------------------------------------------------------------------------------

    def on(self, message: StepMessage | GroupMessage) -> Action | None:
        """Return the action that a message causes, or None.

        Raises: ProtocolError, for a message that is not allowed in this phase.
        """
        if self.phase in (Phase.FAILED, Phase.LEAVING):
            return None
        if isinstance(message, Shutdown):
            self.phase = Phase.LEAVING
            return message
        if isinstance(message, EndEpoch):
            return self._on_end(message)
        if isinstance(message, Ping):
            return message
        is_late = isinstance(message, StepMessage) and message.epoch < self.epoch
        if self.phase is Phase.RANKS_LOST or is_late:
            return None
        handle = self._TABLE.get((self.phase, type(message)))
        if handle is None:
            raise ProtocolError(f"{type(message).__name__} is not allowed while {self.phase.name}")
        return handle(self, message) if self._has_right_epoch(message) else None

    def _has_right_epoch(self, message: Assignment | InitializeCache | StepMessage) -> bool:
        match message:
            case Assignment(epoch=epoch):
                return epoch > self.epoch
            case InitializeCache(epoch=epoch):
                return epoch in (0, self.epoch)
            case LoadBlocks() if self.phase is Phase.REGISTERED:
                return message.drops_all  # of the epoch of others
            case _:
                return message.epoch == self.epoch

    def _on_end(self, message: EndEpoch) -> Action | None:
        if message.epoch < self.epoch:
            return None
        self.phase = Phase.REGISTERED
        return message

    def _on_assignment(self, message: Assignment) -> Action:
        self.phase, self.epoch = Phase.LOADING, message.epoch
        self.last_step = self._last_ticket = self._unmasked = 0
        self.returns = False
        return message

    def _on_initialize(self, message: InitializeCache) -> Action:
        self.phase, self._whole_steps = Phase.INITIALIZING, message.whole_steps
        return message

    def _on_step(self, step: SchedulerOutput) -> Action:
        if step.step_id <= self.last_step:
            return ResendResult(step.step_id)
        expected = self.last_step + 1
        if step.step_id != expected:
            return self._fault(step.step_id, f"step {step.step_id} arrived, but step {expected} is next")
        if self._unmasked:
            return self._fault(step.step_id, f"step {step.step_id} arrived before the masks of step {self._unmasked}")
        self.last_step = step.step_id
        if step.has_structured_output_requests and (self._whole_steps or not self.leaves_rows_out):
            self._unmasked = step.step_id
        return step

    def _on_grammar(self, grammar: GrammarOutput) -> Action:
        if grammar.step_id > self.last_step:
            return self._fault(grammar.step_id, f"a grammar for step {grammar.step_id}, which has not arrived")
        if grammar.step_id == self._unmasked:
            self._unmasked = 0
        return grammar

    def _on_message(self, message: ReleaseSlots | LoadBlocks | KeepPins) -> Action:
        return message

    def _on_load(self, message: LoadBlocks) -> Action | None:
        """A repeated or late one would fill blocks that were given away since."""
        if message.next_step <= self.last_step or message.ticket <= self._last_ticket:
            return None
        self._last_ticket = message.ticket
        return message

    def _fault(self, step_id: int, error: str) -> StepFault:
        self.phase = Phase.FAILED
        return StepFault(self.epoch, step_id, error)

    _TABLE: ClassVar[dict[tuple[Phase, type], Callable[..., Action | None]]] = {
        (Phase.REGISTERED, Assignment): _on_assignment,
        (Phase.REGISTERED, LoadBlocks): _on_message,
        (Phase.LOADED, InitializeCache): _on_initialize,
        (Phase.SERVING, SchedulerOutput): _on_step,
        (Phase.SERVING, GrammarOutput): _on_grammar,
        (Phase.SERVING, ReleaseSlots): _on_message,
        (Phase.SERVING, LoadBlocks): _on_load,
        (Phase.SERVING, KeepPins): _on_message,
    }
