"""Prompt lookup: what followed when the request's last tokens were said before. Costs next to nothing, and proposes
nothing where they are new. A short match is trusted less than a long one.

Of equally long matches the last one counts, as what is near is more alike; vLLM takes the first.
"""

import numpy as np

from protocol.steps import NO_DRAFT
from services.worker.backends.native.drafters.base import I32, Advance, Drafter, Slots, Target
from services.worker.backends.native.kernels.ngram import ngram_kernel


class NgramDrafter(Drafter):
    """Looks at prompt and output of each request, `prompt_lookup_min` to `prompt_lookup_max` tokens at a time."""

    def __init__(self, target: Target) -> None:
        self._kernel, self._speculation = ngram_kernel(), target.speculation
        self._limit = min(target.max_model_len, target.speculation.max_model_len or target.max_model_len)

    def begin(self, slots: Slots) -> None:
        self._history = slots.history

    def propose(self, advance: Advance, k: int) -> I32:
        slots, lengths = advance.slots[advance.samples], advance.ends[advance.samples] + np.int32(1)
        found = np.full((len(slots), k), NO_DRAFT, np.int32)
        room = self._limit - lengths
        at = np.flatnonzero(room > 0)
        if not k or not len(at):
            return found
        slots, lengths, drafts = slots[at], lengths[at], found[at]
        least, most = self._speculation.prompt_lookup_min, self._speculation.prompt_lookup_max
        columns = (
            self._history.shape[1],
            slots.ctypes.data,
            lengths.ctypes.data,
            least,
            most,
            k,
            advance.least_chance,
        )
        self._kernel.run(len(at), (self._history.address, *columns, drafts.ctypes.data))
        drafts[np.arange(k) >= room[at][:, None]] = NO_DRAFT
        found[at] = drafts
        return found
