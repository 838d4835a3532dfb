"""The simulator's drafter: it computes the tokens that the target will sample, and falsifies a configured share.

It stands in for every speculation method, since only two things matter here: which drafts are accepted, and when they
are there.
"""

import numpy as np
from numpy.typing import NDArray

from protocol.steps import NO_DRAFT
from services.worker.backends.sim.model.hashing import BASE, U64
from services.worker.backends.sim.model.logits import scramble
from services.worker.backends.sim.model.oracle import Oracle
from services.worker.backends.sim.sampling.acceptance import DraftAcceptance
from services.worker.backends.sim.sampling.device_drafts import DeviceDrafts
from services.worker.backends.sim.sampling.parameters import RowParameters
from services.worker.backends.sim.sampling.sampler import SamplingPoints, SimSampler
from services.worker.batch.slots import I32

ALWAYS, NEVER = 0, 1
PERIODS = {"always": ALWAYS, "never": NEVER, "periodic": 3}
"""By `SimulatorConfig.sim_draft_acceptance`: drafts at multiples of this position are wrong. ALWAYS: none is."""
REQUEST_PERIODS = np.array([ALWAYS, NEVER, 2, 3, 5], np.int64)
"""The periods of which "request" chooses one per request."""


class SimDrafter:
    """The drafter of one epoch. Its methods run on the device.

    Args:
        acceptance: `SimulatorConfig.sim_draft_acceptance`.
        longest: sequences that would become longer than this get no drafts (drafter limit); 0: no limit.
    """

    def __init__(
        self, acceptance: str, longest: int, sampler: SimSampler, oracle: Oracle, drafts: DeviceDrafts
    ) -> None:
        self._acceptance, self._longest = acceptance, longest
        self._sampler, self._oracle, self._drafts = sampler, oracle, drafts

    def propose(self, step_id: int, acceptance: DraftAcceptance, tokens: I32) -> None:
        """Propose drafts for the sampled rows of a step, and store them for the slots' next rows.

        Args:
            tokens: int32[sampled rows, requested], in device memory of this step alone: NO_DRAFT where nothing is
                proposed.
        """
        requested, firsts = tokens.shape[1], acceptance.frontiers + 1
        counts = np.clip(self._oracle.max_len - firsts, 0, requested)
        counts[acceptance.counts == 0] = 0
        if self._longest:
            counts[firsts + requested > self._longest] = 0
        drafted = np.flatnonzero(counts)
        if len(drafted):
            tokens[drafted] = self._draft(acceptance, drafted, firsts[drafted], requested)
            tokens[np.arange(requested) >= counts[:, None]] = NO_DRAFT
        self._drafts.put(step_id, acceptance.slots, firsts, tokens)

    def _draft(self, acceptance: DraftAcceptance, sampled_rows: NDArray[np.int64], firsts: I32, requested: int) -> I32:
        """Return int32[sampled_rows, requested] drafts from the positions `firsts` on."""
        oracle, parameters, slots = self._oracle, acceptance.parameters, acceptance.slots[sampled_rows]
        last = oracle.tokens(slots, firsts - 1)
        hashes = oracle.extend(oracle.chain[slots, firsts - 1], last)
        periods, tokens = self._periods(parameters, slots, sampled_rows), np.empty((len(slots), requested), np.int32)
        for j in range(requested):
            points = SamplingPoints(sampled_rows, slots, firsts + j, hashes)
            right = self._sampler.sample(points, parameters, proposed=tokens[:, :j])
            wrong = (periods > ALWAYS) & (points.positions % np.maximum(periods, 1) == 0)
            tokens[:, j] = np.where(wrong, (right + 1) % oracle.vocab_size, right)
            hashes = oracle.extend(hashes, tokens[:, j])
        return tokens

    def _periods(self, parameters: RowParameters, slots: I32, sampled_rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return int64[rows]: the period of each request, independent of its slot, step and batch."""
        if self._acceptance in PERIODS:
            return np.full(len(slots), PERIODS[self._acceptance])
        prompts: U64 = self._oracle.chain[slots, parameters.num_prompt[sampled_rows]]
        words = scramble(prompts ^ parameters.seed[sampled_rows] * np.uint64(BASE))
        return REQUEST_PERIODS[(words % np.uint64(len(REQUEST_PERIODS))).astype(np.int64)]
