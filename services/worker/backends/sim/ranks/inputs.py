"""Inputs of a step that a rank receives from other stages."""

from dataclasses import dataclass

from services.worker.backends.sim.model.oracle import Activations
from services.worker.batch.slots import I32


@dataclass(frozen=True)
class StageFeedback:
    """Outcome of an earlier step on the last stage, of rows whose owner still has its slot; int32[rows] each."""

    step_id: int
    slots: I32
    firsts: I32
    """Position of each row's first token."""
    counts: I32
    """Tokens of the row: accepted drafts and one more; 0: it was left out."""
    token_ids: I32
    """int32[sum(counts)], rows back to back."""
    drafts: I32
    """int32[rows, proposed]: drafts for the next row; NO_DRAFT from their end on."""


@dataclass(frozen=True)
class ReceivedInputs:
    """Inputs of a step that other stages sent."""

    available_at: float = 0.0
    """When the last of them arrives on the modelled timeline: monotonic seconds."""
    feedback: tuple[StageFeedback, ...] = ()
    """On the first stage."""
    activations: Activations | None = None
    """On all stages but the first."""
