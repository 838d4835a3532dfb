"""What the scheduler knows per request and step, as columns by slot (spec 0.1 names in brackets).

A slot belongs to one request from admission until it leaves and every step that names the slot was processed: one
life of a slot is one *generation* of the request (spec 0.2), and so is each stretch of it between rollbacks (spec 0.7).
So a late row is recognised by the state and generation of its slot. Blocks and slot leave together behind one fence.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from protocol.sampling import Pooling
from services.scheduler.core.request import Request

Rows = NDArray[np.int64]
"""Slots as an index: NumPy gathers through int64 at a third of the cost of int32; the wire carries int32."""
Column = NDArray[np.int32]

FREE, LIVE, DELIVER, DROP = range(4)
"""States of a slot. DELIVER and DROP are retired: the request left while steps in flight name the slot. What these
bring is appended to the request (preempted, tokens valid) or ignored (finished, aborted, reset)."""

NO_TOKEN = -1
"""Pads stop ids; in a result, the row that its runner did not come to sample."""


class SlotTable:
    """Columns of `num_slots` rows; int32 unless stated.

    Invariants after every transition, for live slots (spec 0.2): `0 <= committed <= tokens`,
    `0 <= inflight <= computed`, `placeholders >= 0`, and while a sampling row is in flight
    `computed == tokens + placeholders - 1`.
    """

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        def column() -> Column:
            return np.zeros(num_slots, np.int32)

        self.num_slots = num_slots
        self.state = np.zeros(num_slots, np.int8)
        self.generation = column()
        self.rank = np.zeros(num_slots, np.int64)
        self.client = column()
        self.number = np.zeros(num_slots, np.uint32)
        self.prompt = column()  # p
        self.tokens = column()  # T, confirmed
        self.computed = column()  # P, optimistic
        self.inflight = column()  # F
        self.placeholders = column()  # H
        self.sampling = column()
        """Rows in flight that sample: each yields one token at least."""
        self.proposed = column()
        """Drafts that the newest sampling row was told to propose; they wait in the slot for its next row."""
        self.drafted = column()
        """Drafts verified in this slot, and ..."""
        self.accepted = column()
        """... how many of them became output."""
        self.limit = column()
        """Total tokens at which the request certainly ends: prompt + max_tokens or the context limit."""
        self.stops_from = column()
        """Total tokens from which stop tokens count."""
        self.entry = column()
        """Tokens the request had when it got the slot: its prefill ends there (the prompt, or more after a resume)."""
        self.constrained = np.zeros(num_slots, np.bool_)
        """Whether a grammar decides what may be sampled."""
        self.pooling = np.zeros(num_slots, np.bool_)
        """Whether an embedding is asked for; the token that comes instead means nothing."""
        self.sampled_step = np.zeros(num_slots, np.int64)
        """Newest step that samples for the slot."""
        self.capacity = column()
        """Tokens that the slot's blocks hold."""
        self.next_commit = column()
        """Committed tokens at which the next full block can enter the prefix cache."""
        self.last_step = np.zeros(num_slots, np.int64)
        """Newest step that names the slot: its fence."""
        self.history = np.empty((num_slots, max_model_len), np.int32)
        """Token ids, `tokens` of them valid per row. Pages are touched only where tokens are."""
        self.stop_ids = np.full((num_slots, 1), NO_TOKEN, np.int32)
        """[num_slots, widest set in use]: EOS and stop tokens, padded with NO_TOKEN. Each step compares this wide."""
        self._num_stop_ids = column()
        self.owner: list[Request | None] = [None] * num_slots
        self.free = deque(range(num_slots))

    def assign(self, request: Request, max_model_len: int) -> int:
        """Gives the request a fresh slot with every column reset (a stale column would leak across requests)."""
        slot = self.free.popleft()
        params, num_tokens = request.params, len(request.token_ids)
        self.state[slot] = LIVE
        self.generation[slot] += 1
        self.owner[slot] = request
        self.rank[slot] = request.rank
        self.client[slot] = request.client
        self.number[slot] = request.number
        self.prompt[slot] = request.num_prompt_tokens
        self.tokens[slot] = self.entry[slot] = num_tokens
        self.computed[slot] = self.inflight[slot] = self.placeholders[slot] = self.sampling[slot] = 0
        self.proposed[slot] = self.drafted[slot] = self.accepted[slot] = 0
        self.limit[slot] = min(request.num_prompt_tokens + params.max_tokens, max_model_len)
        self.stops_from[slot] = request.stops_from
        self.capacity[slot] = self.next_commit[slot] = 0
        self.last_step[slot] = self.sampled_step[slot] = 0
        self.constrained[slot] = request.grammar is not None
        self.pooling[slot] = request.pooling is not Pooling.NONE
        self.history[slot, :num_tokens] = request.token_ids
        self._set_stop_ids(slot, params.eos_token_ids + params.stop_token_ids)
        request.slot = slot
        return slot

    def _set_stop_ids(self, slot: int, ids: tuple[int, ...]) -> None:
        if len(ids) > self.stop_ids.shape[1]:
            extra = np.full((self.num_slots, len(ids) - self.stop_ids.shape[1]), NO_TOKEN, np.int32)
            self.stop_ids = np.hstack((self.stop_ids, extra))
        self._num_stop_ids[slot] = len(ids)
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(ids)] = ids

    def retire(self, slot: int, state: int) -> None:
        """Takes the slot from its request, which gets its tokens back; rows in flight may still name the slot."""
        request = self.request(slot)
        request.token_ids = self.history[slot, : self.tokens[slot]].copy()
        self.give_draft_counts(slot)
        request.slot = -1
        self.state[slot] = state

    def give_draft_counts(self, slot: int) -> None:
        """To the request, which has left the slot or is about to."""
        request = self.request(slot)
        request.num_draft_tokens += int(self.drafted[slot])
        request.num_accepted_tokens += int(self.accepted[slot])
        self.drafted[slot] = self.accepted[slot] = 0

    def release(self, slot: int) -> None:
        """The fence has passed: the slot may be given away."""
        self.state[slot] = FREE
        self.owner[slot] = None
        self.free.append(slot)
        self._num_stop_ids[slot] = 0
        widest = max(1, int(self._num_stop_ids.max()))
        if widest < self.stop_ids.shape[1]:
            self.stop_ids = np.ascontiguousarray(self.stop_ids[:, :widest])

    def request(self, slot: int) -> Request:
        request = self.owner[slot]
        if request is None:
            raise KeyError(f"slot {slot} is free")
        return request

    def wanted(self, rows: Rows, next_step: int, stages: int) -> Column:
        """Tokens that each slot could compute now, drafts included (spec 0.3); 0 where the next one is not known to the
        device yet."""
        tokens, computed, sampling = (
            self.tokens.take(rows),
            self.computed.take(rows),
            self.sampling.take(rows),
        )
        want = tokens + self.placeholders.take(rows) - computed + self.proposed.take(rows)
        # As if every draft in flight were accepted, the context may be full before it is (S2-5).
        np.minimum(want, self.history.shape[1] - computed, out=want)
        want[tokens + sampling >= self.limit.take(rows)] = (
            0  # certainly finished: exact at any depth (spec 0.5 A)
        )
        if stages > 1:  # what the last stage sampled and proposed reaches the first after so many steps
            want[(sampling > 0) & (next_step - self.sampled_step.take(rows) < stages)] = 0
        return want

    def decoding(self, rows: Rows) -> NDArray[np.bool_]:
        """Whether the prefill is dispatched as a whole: what a row wants now is decode."""
        return self.computed.take(rows) >= self.entry.take(rows)

    def committed(self, rows: Rows) -> Column:
        """C: the KV frontier that is written and confirmed (spec 0.1)."""
        return self.computed.take(rows) - self.inflight.take(rows)
