"""The exchange between a rank and the others in each step, and the one of a group's only rank."""

from dataclasses import dataclass

from protocol.steps import SchedulerOutput
from services.worker.backends.mask_inbox import TakenMasks
from services.worker.backends.sim.model.hashing import U64
from services.worker.backends.sim.model.oracle import Activations
from services.worker.backends.sim.sampling.acceptance import DraftAcceptance
from services.worker.batch.slots import I32, Rows


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


class RankExchange:
    """The exchange of a group's only rank, which sends nothing. That of other ranks overrides every method.

    The methods run on the device, in this order in every step. The plan alone determines sender and message (plan
    agreement; docs/invariants.md). Every method but `abort` raises RanksLost, or OracleError if ranks disagree.
    """

    def receive_inputs(self, step: SchedulerOutput, rows: Rows) -> ReceivedInputs:
        """Wait for the inputs of a step that was applied."""
        return ReceivedInputs()

    def send_activations(
        self, step: SchedulerOutput, rows: Rows, hashes: U64, leaving: Activations | None, ended: float
    ) -> None:
        """Compare `hashes`, uint64[rows], with the other ranks of the stage, and send `leaving` to the next stage.

        Args:
            leaving: None on the last stage.
            ended: when the forward pass ends on the modelled timeline.
        """

    def send_left_out(self, step: SchedulerOutput, taken: TakenMasks) -> None:
        """Send the slots of left-out rows from the output rank to the other ranks of the last stage."""

    def receive_left_out(self, step: SchedulerOutput) -> TakenMasks:
        """Receive these, without masks, on another rank of the last stage."""
        raise RuntimeError("the only rank decides itself")

    def send_sampled(self, step: SchedulerOutput, sampled: DraftAcceptance, drafts: I32, ended: float) -> None:
        """Compare the tokens with the other ranks of the last stage, and send them with `drafts` to the first stage.

        Args:
            drafts: int32[sampled rows, proposed].
            ended: when tokens and drafts are there on the modelled timeline.
        """

    def abort(self) -> None:
        """Make every wait for another rank raise RanksLost. May be called from any thread."""
