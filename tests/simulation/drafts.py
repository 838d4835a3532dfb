"""Speculation in the simulated world: which drafts are right is programmed, their number is fixed or drawn."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from services.scheduler.core.drafting import Drafting, FixedDrafting
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.limits import Limits
from services.scheduler.core.slots import Column

Foresight = Callable[[int], list[int]]
"""Slot -> all tokens that its request will have, prompt and answer."""

ALWAYS, NEVER = 0, 1
PERIODS = {"always": ALWAYS, "never": NEVER, "every second": 2, "every third": 3}
"""Acceptance -> n: every n-th position of a sequence has a wrong draft. ALWAYS: none has."""
OF_REQUESTS = (ALWAYS, NEVER, 2, 3, 5)
"""Periods from which "by request" chooses."""
ACCEPTANCES = (*PERIODS, "by request")


class Drawn:
    """A `Drafting` with another number of drafts in every step."""

    min_acceptance = 0.0
    is_trial = rests = False

    def __init__(self, lengths: tuple[int, ...], seed: int) -> None:
        self._lengths, self._rng = lengths, Random(seed)

    def length(self, num_rows: int) -> int:
        number = self._rng.choice(self._lengths)
        self.rests = not number and self._rng.random() < 0.5
        return number

    def observe(self, step: InflightStep, drafted: Column, counts: Column, sampled: float) -> None:
        """Ignored."""


@dataclass(frozen=True)
class Speculating:
    acceptance: str = "every third"
    lengths: tuple[int, ...] = (3,)
    """Numbers of drafts that a step may request; one of them is drawn."""
    looks_ahead: bool = False
    """True: the drafter writes KV of its own at the positions of its drafts."""
    longest: int = 0
    """Longest sequence that gets drafts (drafter limit), in tokens; 0: no limit."""

    @property
    def most(self) -> int:
        return max(self.lengths)

    def drafting(self, seed: int = 0) -> Drafting:
        return FixedDrafting(self.most) if len(self.lengths) == 1 else Drawn(self.lengths, seed)

    def limits(self, limits: Limits, depth: int) -> Limits:
        ahead = self.most if self.looks_ahead else 0
        rows = -(-depth // limits.stages)
        return replace(limits, lookahead=ahead, drafts_in_flight=self.most * rows)

    def draft(self, right: list[int], identity: int, first: int, vocab: int) -> list[int]:
        """Return drafts for the `right` tokens from position `first` on. They depend on the request's `identity` alone,
        not on slot or step."""
        period = PERIODS.get(self.acceptance, OF_REQUESTS[identity % len(OF_REQUESTS)])
        return [
            (token + 1) % vocab if period and position % period == 0 else token
            for position, token in enumerate(right, first)
        ]
