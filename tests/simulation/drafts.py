"""How a simulated world speculates: which drafts hold is programmed, how many are asked for is fixed or drawn."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from services.scheduler.core.drafting import Drafting, FixedDrafting
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.limits import Limits
from services.scheduler.core.slots import Column

Foresight = Callable[[int], list[int]]
"""Slot -> every token that its request will have, prompt and answer."""

ALWAYS, NEVER = 0, 1
PERIODS = {"always": ALWAYS, "never": NEVER, "every second": 2, "every third": 3}
"""By acceptance: every so many-th position of a sequence is drafted wrong. ALWAYS: none is."""
OF_REQUESTS = (ALWAYS, NEVER, 2, 3, 5)
"""What "by request" chooses from."""
ACCEPTANCES = (*PERIODS, "by request")


class Drawn:
    """A `Drafting`: another length in every step."""

    least_chance = 0.0

    def __init__(self, lengths: tuple[int, ...], seed: int) -> None:
        self._lengths, self._rng = lengths, Random(seed)

    def length(self, num_rows: int) -> int:
        return self._rng.choice(self._lengths)

    def observe(self, step: InflightStep, drafted: Column, counts: Column, seconds: float) -> None:
        """Nothing it sees changes it."""


@dataclass(frozen=True)
class Speculating:
    acceptance: str = "every third"
    lengths: tuple[int, ...] = (3,)
    """How many drafts a step asks for: always so many, or drawn."""
    looks_ahead: bool = False
    """Whether the drafter has KV of its own at the positions that it drafts."""
    longest: int = 0
    """Longest sequence that gets drafts (drafter limit); 0: no limit."""

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
        """Drafts in place of the `right` tokens from position `first` on, for a request of that `identity` in whatever
        slot and step it is."""
        period = PERIODS.get(self.acceptance, OF_REQUESTS[identity % len(OF_REQUESTS)])
        return [
            (token + 1) % vocab if period and position % period == 0 else token
            for position, token in enumerate(right, first)
        ]
