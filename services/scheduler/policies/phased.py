"""For devices that cannot mix phases: a step is one prefill chunk or a batch of decodes, never both (unmixed step).

The policy has no state. A request is *in prefill* while part of its prefill is not dispatched. It *decodes* when its
last chunk was processed (committed position >= entry), because only then the device has its row (processed prefill).
The kind of the last step is in the ledger. What is reserved for running requests follows from their limits and blocks.
"""

from typing import Self

import numpy as np

from services.config import SchedulerConfig
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import Request
from services.scheduler.core.slots import SlotIds
from services.scheduler.policies.base import SchedulerView, StepBudget
from services.scheduler.policies.geometry import Geometry

_NO_SLOTS = np.empty(0, np.int64)
_ANY_VOLUME = np.iinfo(np.int64).max


class PhasedPolicy:
    """Prefill of one request or decode of many.

    Args:
        interleave: allow no two consecutive prefill steps while a request can decode (interleaving). A request is then
            admitted with its first chunk, and its last chunk waits until it fits among the decodes (volume limit);
            otherwise everything is checked at the first chunk.
        max_volume: maximum of rows times longest row of a decode step, in tokens; 0: no limit.
        pausing: do not delay new requests for decodes that may exceed the volume together later; some of these decodes
            pause in turn instead, and resume when they fit (pausing).
    """

    def __init__(self, limits: Limits, interleave: bool = True, max_volume: int = 0, pausing: bool = False) -> None:
        """Raises: ValueError, if a request alone could not be served; names the number that would do."""
        self._geometry = Geometry(limits.block_size, limits.max_num_batched_tokens)
        if limits.max_num_batched_tokens % limits.block_size:
            raise ValueError(
                f"phased: {limits.max_num_batched_tokens} batched tokens are not whole blocks of {limits.block_size}"
            )
        longest = self._geometry.last_length(0, limits.max_model_len + 1)
        if 0 < max_volume < longest:
            raise ValueError(
                f"phased: a volume of {max_volume} cannot hold a request of {limits.max_model_len} tokens; "
                f"it takes {longest}"
            )
        self._interleave, self._pausing = interleave, pausing
        self._max_volume = max_volume or _ANY_VOLUME

    @classmethod
    def from_config(cls, config: SchedulerConfig, limits: Limits) -> Self:
        return cls(limits, config.phased_interleave, config.phased_max_volume, config.phased_pausing)

    # -- answers -------------------------------------------------------------------------------------------------

    def begin(self, view: SchedulerView) -> StepBudget:
        rows, most = self._rows_of_step(view), view.limits.max_num_batched_tokens
        if rows is None:
            return StepBudget(most, most, admissions=1, runner_reports=True)
        chunk = 1
        if len(rows):
            s, row = view.slots, rows[0]
            at, entry = int(s.computed[row]), int(s.entry[row])
            chunk = self._geometry.chunk_end(entry, at) - at if at < entry else 1
        return StepBudget(most, chunk, admissions=0, runner_reports=True)

    def order(self, view: SchedulerView) -> SlotIds:
        rows = self._rows_of_step(view)
        return _NO_SLOTS if rows is None else rows

    def admit(self, view: SchedulerView, request: Request, hit: int, count: int) -> tuple[int, int]:
        """Whole chunks of the hit, and the chunk behind them."""
        return self._first_chunk(view, request) or (0, 0)

    def _rows_of_step(self, view: SchedulerView) -> SlotIds | None:
        """The decode batch, or the request in prefill; None if a waiting request starts."""
        able = self._decodable(view)
        if self._interleave and len(able) and _after_prefill(view):
            return self._batch(view, able)
        in_prefill = self._in_prefill(view)
        if len(in_prefill):  # single prefill
            return in_prefill if self._may_continue(view, int(in_prefill[0])) else self._batch(view, able)
        batch = self._batch(view, able)
        all_decode = len(batch) == len(able)  # paused decodes come before new requests
        return None if all_decode and self._may_start(view) else batch

    # -- phases --------------------------------------------------------------------------------------------------

    @staticmethod
    def _decodable(view: SchedulerView) -> SlotIds:
        """Slots that could decode one token now."""
        s, rows = view.slots, view.running
        return view.ready(rows[s.committed(rows) >= s.entry[rows]])

    @staticmethod
    def _in_prefill(view: SchedulerView) -> SlotIds:
        """The slot whose prefill continues. After a rollback there may be two; the lower order key comes first."""
        s, rows = view.slots, view.running
        return rows[s.computed[rows] < s.entry[rows]][:1]

    def _batch(self, view: SchedulerView, able: SlotIds) -> SlotIds:
        """As many of `able` as one step can take, the longest-waiting first (pausing)."""
        fits = self._fitting(view, able)
        if len(fits) == len(able):
            return able
        waiting = able[np.argsort(view.slots.last_step[able], kind="stable")]
        return waiting[self._fitting(view, waiting)]

    def _fitting(self, view: SchedulerView, rows: SlotIds) -> SlotIds:
        limits = view.limits
        lengths = view.slots.computed[rows] + 1
        return self._geometry.fitting(lengths, limits.max_num_batched_tokens, limits.max_model_len, self._max_volume)

    # -- admission -----------------------------------------------------------------------------------------------

    def _may_start(self, view: SchedulerView) -> bool:
        """Return whether the first waiting request may start now."""
        if len(view.running) >= view.limits.max_num_seqs or not view.slots.free:
            return False
        request = next(view.candidates(), None)
        return request is not None and self._first_chunk(view, request) is not None

    def _first_chunk(self, view: SchedulerView, request: Request) -> tuple[int, int] | None:
        """(tokens taken from the prefix cache, tokens computed), or None while the request has to wait for blocks
        (block reservation) or for the volume."""
        kv, geometry, tokens = view.kv, self._geometry, len(request.token_ids)
        prefix = kv.find_prefix(request)
        hit = geometry.usable_prefix(tokens, len(prefix) * kv.block_size)
        del prefix[hit // kv.block_size :]
        limit = request.token_limit(view.limits.max_model_len)
        if kv.num_missing(prefix, limit - 1) > kv.num_free - _reserved(view):
            return None
        end = geometry.chunk_end(tokens, hit)
        if (end == tokens or not self._interleave) and not self._fits(view, tokens, limit):
            return None
        return hit, end - hit

    def _may_continue(self, view: SchedulerView, slot: int) -> bool:
        """Return whether the next chunk of a prefill may be dispatched: the last one waits for room among the decodes,
        which it has if that was checked at the first chunk."""
        s = view.slots
        entry = int(s.entry[slot])
        last = self._geometry.chunk_end(entry, int(s.computed[slot])) == entry
        return not last or self._fits(view, entry, int(s.limit[slot]))

    def _fits(self, view: SchedulerView, tokens: int, limit: int) -> bool:
        """Return whether all can decode to their ends together with a new request of `tokens` that ends at `limit`
        (volume limit). Lengths are those of the step that is being formed, steps in flight included (predicted
        length)."""
        s, geometry = view.slots, self._geometry
        rows = view.running[s.computed[view.running] >= s.entry[view.running]]
        left = s.limit[rows] - s.tokens[rows] - s.sampling[rows]
        rows, left = rows[left > 0], left[left > 0]
        tkv = geometry.tkv(s.computed[rows] + 1) if len(rows) else 0
        start = geometry.joining(tkv, tokens)
        longest = max(tkv - 1, start) + max(int(left.max(initial=0)), limit - tokens)
        if longest > view.limits.max_model_len:
            return False
        if self._pausing or self._max_volume == _ANY_VOLUME:
            return True
        ends = [geometry.last_length(max(tkv, tokens), steps) for steps in left.tolist()]
        newcomer = geometry.last_length(start, limit - tokens)
        return geometry.peak_volume(newcomer, ends) <= self._max_volume


def _after_prefill(view: SchedulerView) -> bool:
    """Return whether the newest step was a prefill. Its slots may be free again, but no slot is assigned before another
    step is dispatched."""
    step = view.ledger.newest
    return step is not None and bool(step.starts[0] < view.slots.entry[step.slots[0]])


def _reserved(view: SchedulerView) -> int:
    """Blocks that running requests do not hold yet and may need until their end (block reservation)."""
    rows, size = view.running, view.limits.block_size
    needed = -(-(view.slots.limit[rows] - 1) // size)
    return int(np.maximum(needed - view.slots.capacity[rows] // size, 0).sum())
