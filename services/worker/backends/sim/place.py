"""What a rank has to do with others in each step; alone, nothing."""

from dataclasses import dataclass
from typing import Protocol

from protocol.steps import SchedulerOutput
from services.worker.backends.sim.acceptance import Acceptance
from services.worker.backends.sim.device import Device
from services.worker.backends.sim.hashing import U64
from services.worker.backends.sim.oracle import Activations
from services.worker.batch.slots import I32, Rows


@dataclass(frozen=True)
class Feedback:
    """What became of an earlier step on the last stage; int32[rows] each, of owners that still have their slot."""

    step_id: int
    slots: I32
    firsts: I32
    """Position of each row's first token."""
    counts: I32
    """Tokens of the row: drafts that were accepted and one more."""
    token_ids: I32
    """int32[sum(counts)], rows back to back"""
    drafts: I32
    """int32[rows, proposed]: for the next row, NO_DRAFT from where there are no more."""


@dataclass(frozen=True)
class Arrived:
    """What a step needs from other stages."""

    at: float = 0.0
    """When the last of it is there, on the modelled timeline: monotonic seconds."""
    feedback: tuple[Feedback, ...] = ()
    """On the first stage."""
    activations: Activations | None = None
    """On all stages but the first."""


class Place(Protocol):
    """Called in this order in every step. Who sends what follows from the plan alone (spec 3(b) 10).

    Raises, all but `abort`: RanksLost; OracleError, where ranks disagree.
    """

    def arrive(self, step: SchedulerOutput, rows: Rows) -> Arrived:
        """Waits for what a step that was applied needs from other stages."""
        ...

    def forwarded(
        self,
        device: Device,
        step: SchedulerOutput,
        rows: Rows,
        hashes: U64,
        leaving: Activations | None,
        ended: float,
    ) -> None:
        """The ranks of a stage compare `hashes`, uint64[rows], and hand `leaving` on; None on the last stage."""
        ...

    def sampled(
        self, device: Device, step: SchedulerOutput, sampled: Acceptance, drafts: I32, ended: float
    ) -> None:
        """The ranks of the last stage compare the step's tokens and send them to the first stage, with `drafts`,
        int32[rows, proposed]."""
        ...

    def abort(self) -> None:
        """From any thread: who waits here gets RanksLost."""
        ...


class Alone:
    """The place of a group's only rank."""

    def arrive(self, step: SchedulerOutput, rows: Rows) -> Arrived:
        return Arrived()

    def forwarded(
        self,
        device: Device,
        step: SchedulerOutput,
        rows: Rows,
        hashes: U64,
        leaving: Activations | None,
        ended: float,
    ) -> None:
        pass

    def sampled(
        self, device: Device, step: SchedulerOutput, sampled: Acceptance, drafts: I32, ended: float
    ) -> None:
        pass

    def abort(self) -> None:
        pass
