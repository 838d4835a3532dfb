"""The simulator's own drafter: it knows what the target will say, and is wrong where it was told to be.

It stands in for every method, since what matters here is which drafts hold and when they are there. Drafts stay in the
memory of the device, by slot, until the slot's next row takes them (spec 2(b) 5), however many steps later. What the
host tells the drafter about rows is a snapshot or the drafter's own copy on the device, never a buffer that somebody
else writes (spec 2(d)).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.steps import NO_DRAFT
from services.worker.backends.sim.acceptance import Acceptance
from services.worker.backends.sim.hashing import BASE, U64
from services.worker.backends.sim.inputs import StepInputs
from services.worker.backends.sim.logits import scramble
from services.worker.backends.sim.oracle import Oracle, OracleError, spread
from services.worker.backends.sim.sampler import Places, Sampler, Wishes
from services.worker.batch.slots import I32

ALWAYS, NEVER = 0, 1
PERIODS = {"always": ALWAYS, "never": NEVER, "periodic": 3}
"""By acceptance: every so many-th position is drafted wrong. ALWAYS: none is."""
OF_REQUESTS = np.array([ALWAYS, NEVER, 2, 3, 5], np.int64)
"""What "request" chooses from."""


_NOTHING = np.empty(0, np.int32)


class Drafts:
    """What was proposed for each slot after its newest token, on the device."""

    def __init__(self, num_slots: int, most: int) -> None:
        self._most = most
        self._tokens = np.full((num_slots, most), NO_DRAFT, np.int32)
        self._have = np.zeros(num_slots, np.int32)
        self._asked = np.zeros(num_slots, np.int32)
        self._firsts = np.zeros(num_slots, np.int32)
        """Position of the first draft."""
        self._steps = np.zeros(num_slots, np.int32)
        """Step that proposed them."""

    def forget(self, slot: int) -> None:
        self._have[slot] = self._asked[slot] = 0

    def put(self, step_id: int, slots: I32, firsts: I32, tokens: I32) -> None:
        """int32[rows, asked] tokens, NO_DRAFT from where a row has no more."""
        asked = tokens.shape[1]
        self._tokens[slots, :asked], self._firsts[slots], self._steps[slots] = tokens, firsts, step_id
        self._have[slots], self._asked[slots] = (tokens != NO_DRAFT).cumprod(1).sum(1), asked

    def take(self, slots: I32, firsts: I32, wanted: I32) -> tuple[I32, I32]:
        """int32[rows]: how many each row gets of the `wanted` ones, the first of which stands at `firsts`; and the
        tokens, rows back to back. After that there are none.

        Raises: OracleError, if they were proposed for another position, or the plan counts on more than it asked for.
        """
        if not self._most:
            return wanted, _NOTHING
        have, asked = self._have[slots], self._asked[slots]
        self._have[slots] = self._asked[slots] = 0
        if not wanted.any():
            return wanted, _NOTHING
        counts = np.minimum(wanted, have)
        wrong = (wanted > asked) | ((counts > 0) & (self._firsts[slots] != firsts))
        if wrong.any():
            i = int(wrong.argmax())
            raise OracleError(
                f"slot {slots[i]}: {wanted[i]} drafts from position {firsts[i]} on are planned, but step "
                f"{self._steps[slots[i]]} proposed {asked[i]}, from {self._firsts[slots[i]]} on (S2-6)"
            )
        rows, offsets = spread(np.zeros_like(counts), counts)
        return counts, self._tokens[slots[rows], offsets]


class Proposed(NamedTuple):
    """Rows that sampled in a step, on the device, and what they are made of."""

    step_id: int
    acceptance: Acceptance
    wishes: Wishes
    tokens: I32
    """int32[rows, asked], in device memory of this step alone: NO_DRAFT where nothing is proposed."""


class Drafter:
    """Of one epoch; its methods run on the device.

    Args:
        acceptance: of `WorkerConfig.sim_draft_acceptance`
        longest: sequences that would become longer than this get no drafts (spec 2(b) 10); 0: no such limit
    """

    def __init__(
        self,
        acceptance: str,
        longest: int,
        sampler: Sampler,
        oracle: Oracle,
        inputs: StepInputs,
        drafts: Drafts,
    ) -> None:
        self._acceptance, self._longest = acceptance, longest
        self._sampler, self._oracle, self._inputs, self._drafts = sampler, oracle, inputs, drafts

    def propose(self, to: Proposed) -> None:
        """Fills `to.tokens` and keeps them for the slots' next rows."""
        acceptance, oracle, asked = to.acceptance, self._oracle, to.tokens.shape[1]
        frontiers = acceptance.frontiers
        firsts = frontiers + 1
        counts = np.clip(oracle.max_len - firsts, 0, asked)
        if self._longest:
            counts[firsts + asked > self._longest] = 0
        at = np.flatnonzero(counts)
        if len(at):
            to.tokens[at] = self._tokens(to, at, firsts[at], asked)
            to.tokens[np.arange(asked) >= counts[:, None]] = NO_DRAFT
        self._drafts.put(to.step_id, acceptance.slots, firsts, to.tokens)

    def _tokens(self, to: Proposed, at: NDArray[np.int64], firsts: I32, asked: int) -> I32:
        """int32[rows, asked] of the sampled rows `at`."""
        oracle, slots, rows = self._oracle, to.acceptance.slots[at], to.acceptance.rows[at]
        last = oracle.tokens(slots, firsts - 1)
        hashes = oracle.extend(oracle.chain[slots, firsts - 1], last)
        periods, tokens = self._periods(slots, rows), np.empty((len(at), asked), np.int32)
        for j in range(asked):
            places = Places(at, rows, slots, firsts + j, hashes)
            right = self._sampler.sample(places, to.wishes, behind=tokens[:, :j])
            wrong = (periods > ALWAYS) & (places.positions % np.maximum(periods, 1) == 0)
            tokens[:, j] = np.where(wrong, (right + 1) % oracle.vocab_size, right)
            hashes = oracle.extend(hashes, tokens[:, j])
        return tokens

    def _periods(self, slots: I32, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[rows]: the same for a request in whatever slot, step and company it is."""
        if self._acceptance in PERIODS:
            return np.full(len(slots), PERIODS[self._acceptance])
        prompts: U64 = self._oracle.chain[slots, self._inputs.num_prompt[rows]]
        words = scramble(prompts ^ self._inputs.seed[rows] * np.uint64(BASE))
        return OF_REQUESTS[(words % np.uint64(len(OF_REQUESTS))).astype(np.int64)]
