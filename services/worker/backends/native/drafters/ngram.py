"""Prompt lookup: the tokens that followed an earlier occurrence of the request's last tokens. It costs almost nothing,
and proposes nothing if the last tokens have not occurred before. A short match yields fewer drafts than a long one.

Among equally long matches the last one is used, because nearby text is more similar; vLLM uses the first.
"""

from functools import partial

import numpy as np

from protocol.steps import NO_DRAFT
from services.worker.backends.native.drafters.base import Advance, Drafter, DrafterSlots, Proposer, TargetModel
from services.worker.batch.slots import I32
from services.worker.kernels.interface.drafting import DraftingKernels


def ngram_drafter(target: TargetModel) -> Drafter:
    """Search prompt and output of each request for its last `prompt_lookup_min` to `prompt_lookup_max` tokens."""
    wanted = target.speculation
    sizes = range(wanted.prompt_lookup_min, wanted.prompt_lookup_max + 1)
    limit = min(target.max_model_len, wanted.max_model_len or target.max_model_len)
    return Drafter(partial(NgramProposer, target.model.kernels.drafting, sizes, limit))


class NgramProposer(Proposer):
    """Sequences of `limit` tokens get no drafts (drafter limit, docs/invariants.md)."""

    def __init__(self, kernels: DraftingKernels, sizes: range, limit: int, slots: DrafterSlots) -> None:
        self._kernels, self._sizes, self._limit = kernels, sizes, limit
        self._history = slots.history

    def propose(self, advance: Advance, k: int) -> I32:
        slots, lengths = advance.slots[advance.samples], advance.ends[advance.samples] + np.int32(1)
        found = np.full((len(slots), k), NO_DRAFT, np.int32)
        room = self._limit - lengths
        at = np.flatnonzero(room > 0)
        if not k or not len(at):
            return found
        drafts = self._kernels.lookup(
            self._history.tokens, slots[at], lengths[at], self._sizes, k, advance.min_acceptance
        )
        drafts[np.arange(k) >= room[at][:, None]] = NO_DRAFT
        found[at] = drafts
        return found
