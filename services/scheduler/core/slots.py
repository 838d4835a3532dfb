"""The state of running requests, as columns by slot.

A slot belongs to one request from its admission until the request has left and every step that names the slot was
processed. Each such life of a slot has its own *generation*, and so has each stretch of it between rollbacks. A late
row is therefore recognised by the state and generation of its slot. Slot and blocks become free together, behind one
fence. Letters in brackets are those of docs/invariants.md.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from protocol.columns import has_any
from protocol.sampling import Pooling
from services.scheduler.core.request import Request

SlotIds = NDArray[np.int64]
"""Slots as an index: NumPy gathers through int64 at a third of the cost of int32; messages carry int32."""
Column = NDArray[np.int32]
"""One number per slot, or per row of a step."""
Mask = NDArray[np.bool_]

FREE, LIVE, DELIVER, DROP = range(4)
"""States of a slot. DELIVER and DROP are retired: the request has left, steps in flight still name the slot. Their
tokens are appended to the request (DELIVER: preempted) or ignored (DROP: finished, aborted or reset)."""

MOST_LATE = 2
"""Rows of a request in succession that may be left out although their masks were made (left-out row)."""
NO_TOKEN = -1
"""Pads stop ids."""


class SlotColumns:
    """Columns of `num_slots` rows; int32 unless stated.

    For live slots, after every transition: `0 <= committed <= tokens`, `0 <= inflight <= computed`,
    `placeholders >= 0`, and while a sampling row is in flight `computed == tokens + placeholders - 1` (position
    identity).
    """

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        def column() -> Column:
            return np.zeros(num_slots, np.int32)

        self.num_slots = num_slots
        self.state = np.zeros(num_slots, np.int8)
        self.generation = column()
        self.order_key = np.zeros(num_slots, np.int64)
        self.frontend = column()
        self.number = np.zeros(num_slots, np.uint32)
        self.prompt = column()
        """Prompt tokens."""
        self.tokens = column()
        """[T] Confirmed tokens: prompt and output."""
        self.computed = column()
        """[P] Optimistic position: advanced at dispatch, as if every draft were accepted."""
        self.inflight = column()
        """[F] Positions in flight."""
        self.placeholders = column()
        """[H] Output tokens promised by rows in flight."""
        self.sampling = column()
        """Sampling rows in flight; each yields at least one token."""
        self.proposed = column()
        """Drafts that the newest sampling row proposes; the slot's next row verifies them."""
        self.drafted = column()
        """Drafts that were verified in this slot."""
        self.accepted = column()
        """Drafts of this slot that became output."""
        self.limit = column()
        """Total tokens at which the request certainly ends: prompt + max_tokens, or the context limit."""
        self.stops_from = column()
        """Total tokens from which stop tokens count."""
        self.entry = column()
        """Tokens of the request when it got the slot. Its prefill ends there: the prompt, or more after a resume."""
        self.media_end = column()
        """End of the last image or sound of the prompt; 0: there is none."""
        self.constrained = np.zeros(num_slots, np.bool_)
        """True: a grammar constrains the output."""
        self.late_masks = column()
        """Rows in succession that were left out although their masks were made."""
        self.pooling = np.zeros(num_slots, np.bool_)
        """True: the request returns an embedding, and its sampled token is ignored."""
        self.num_special = 0
        """Slots that are not free and have a grammar or return an embedding. A step without any costs less."""
        self.sampled_step = np.zeros(num_slots, np.int64)
        """Newest step that samples for the slot."""
        self.capacity = column()
        """Tokens that the slot's blocks hold."""
        self.next_commit = column()
        """Committed position at which the next full block can enter the prefix cache."""
        self.next_whole = column()
        """Committed position at which the next block becomes whole; never behind `next_commit`."""
        self.next_unread = column()
        """Committed position from which another block is behind a window; only with groups that have one."""
        self.last_step = np.zeros(num_slots, np.int64)
        """Newest step that names the slot: its fence."""
        self.history = np.empty((num_slots, max_model_len), np.int32)
        """Token ids, the first `tokens` of a row are valid. Pages of memory are touched only where tokens are."""
        self.stop_ids = np.full((num_slots, 1), NO_TOKEN, np.int32)
        """[num_slots, widest set in use]: EOS and stop tokens, padded with NO_TOKEN. Each step compares this width."""
        self._num_stop_ids = column()
        self.owner: list[Request | None] = [None] * num_slots
        self.free = deque(range(num_slots))

    def assign(self, request: Request, max_model_len: int) -> int:
        """Assign a free slot and reset every column: a stale value would leak into the next request."""
        slot = self.free.popleft()
        params, num_tokens = request.params, len(request.token_ids)
        self.state[slot] = LIVE
        self.generation[slot] += 1
        self.owner[slot] = request
        self.order_key[slot] = request.order_key
        self.frontend[slot] = request.frontend
        self.number[slot] = request.number
        self.prompt[slot] = request.num_prompt_tokens
        self.tokens[slot] = self.entry[slot] = num_tokens
        self.computed[slot] = self.inflight[slot] = self.placeholders[slot] = self.sampling[slot] = 0
        self.proposed[slot] = self.drafted[slot] = self.accepted[slot] = 0
        self.limit[slot] = request.token_limit(max_model_len)
        self.stops_from[slot] = request.stops_from
        self.capacity[slot] = self.next_commit[slot] = self.next_whole[slot] = 0
        self.last_step[slot] = self.sampled_step[slot] = self.late_masks[slot] = 0
        self.media_end[slot] = request.items[-1].end if request.items else 0
        self.constrained[slot] = request.grammar is not None
        self.pooling[slot] = request.pooling is not Pooling.NONE
        self.num_special += self._is_special(slot)
        self.history[slot, :num_tokens] = request.token_ids
        self.set_stop_ids(slot, params.eos_token_ids + params.stop_token_ids)
        request.slot = slot
        return slot

    def set_stop_ids(self, slot: int, ids: tuple[int, ...]) -> None:
        if len(ids) > self.stop_ids.shape[1]:
            extra = np.full((self.num_slots, len(ids) - self.stop_ids.shape[1]), NO_TOKEN, np.int32)
            self.stop_ids = np.hstack((self.stop_ids, extra))
        self._num_stop_ids[slot] = len(ids)
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(ids)] = ids

    def retire(self, slot: int, state: int) -> None:
        """Take the slot from its request and return the tokens to it; steps in flight may still name the slot."""
        request = self.request(slot)
        request.token_ids = self.token_ids(slot)
        self.give_draft_counts(slot)
        request.slot = -1
        self.state[slot] = state

    def token_ids(self, slot: int) -> Column:
        """Copy the confirmed tokens of a live or retired slot."""
        return self.history[slot, : self.tokens[slot]].copy()

    def give_draft_counts(self, slot: int) -> None:
        """Move the draft counts to the request, which has left the slot or is about to."""
        request = self.request(slot)
        request.num_draft_tokens += int(self.drafted[slot])
        request.num_accepted_tokens += int(self.accepted[slot])
        self.drafted[slot] = self.accepted[slot] = 0

    def release(self, slot: int) -> None:
        """Free a retired slot behind its fence."""
        self.num_special -= self._is_special(slot)
        self.state[slot] = FREE
        self.owner[slot] = None
        self.free.append(slot)
        self._num_stop_ids[slot] = 0
        widest = max(1, int(self._num_stop_ids.max()))
        if widest < self.stop_ids.shape[1]:
            self.stop_ids = np.ascontiguousarray(self.stop_ids[:, :widest])

    def _is_special(self, slot: int) -> bool:
        return bool(self.constrained[slot] or self.pooling[slot])

    def request(self, slot: int) -> Request:
        """Return the owner of a live or retired slot.

        Raises: KeyError, if the slot is free.
        """
        request = self.owner[slot]
        if request is None:
            raise KeyError(f"slot {slot} is free")
        return request

    def wanted(self, rows: SlotIds, next_step: int, stages: int) -> Column:
        """Tokens that each slot could compute in step `next_step`, drafts included (slice size); 0 where the next
        token is not on the device yet."""
        tokens, computed = self.tokens[rows], self.computed[rows]
        sampling = self.sampling[rows]
        want = tokens + self.placeholders[rows] - computed + self.proposed[rows]
        # Position bound: if every draft in flight were accepted, the context may be full.
        np.minimum(want, self.history.shape[1] - computed, out=want)
        want[tokens + sampling >= self.limit[rows]] = 0  # certain end
        if stages > 1:  # stage spacing: tokens and drafts of the last stage have not reached the first
            want[(sampling > 0) & (next_step - self.sampled_step[rows] < stages)] = 0
        if self.num_special and has_any(self.late_masks):  # masks of a row that is the only one follow its plan at once
            want[(self.late_masks[rows] >= MOST_LATE) & (sampling > 0)] = 0
        return want

    def decoding(self, rows: SlotIds) -> Mask:
        """bool[rows]: slots whose whole prefill is dispatched."""
        return self.computed[rows] >= self.entry[rows]

    def committed(self, rows: SlotIds) -> Column:
        """[C] Committed position: KV below it is written and confirmed."""
        return self.computed[rows] - self.inflight[rows]
