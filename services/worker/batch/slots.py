"""The batch a worker keeps on the host: one row of columns per slot, changed only by what a step says.

Both backends apply a plan through `SlotTable.apply`, so that what a plan may say is checked in one place. Columns hold
what the host knows without reading anything back from the device: counts of tokens, never the sampled ids.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.rows import StepRows
from protocol.sampling import SamplingParams
from protocol.steps import NewRequest, SchedulerOutput

I32 = NDArray[np.int32]
EMPTY = -1
"""Generation of a slot that nobody has."""
NONE = -1
"""Of log-probabilities: not asked for."""
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class PlanError(RuntimeError):
    """A plan contradicts the batch this worker keeps: the scheduler and the worker no longer agree."""


@dataclass(frozen=True)
class Rows:
    """A plan's rows; int32[rows] unless stated. The arrays view the message's immutable bytes."""

    slots: I32
    generations: I32
    starts: I32
    counts: I32
    """Drafts included."""
    samples: NDArray[np.bool_]
    drafts: I32

    @property
    def ends(self) -> I32:
        """First position after the row: where a token sampled by it will stand."""
        return self.starts + self.counts

    def where(self, mask: NDArray[np.bool_]) -> "Rows":
        return Rows(*(column[mask] for column in vars(self).values()))


class SlotTable:
    """Columns of `num_slots` rows; int32 unless stated. Every column is reset when a slot is assigned."""

    def __init__(self, num_slots: int, block_size: int, num_blocks: int, max_model_len: int) -> None:
        self.num_slots, self.block_size = num_slots, block_size
        self.total_blocks, self.max_model_len = num_blocks, max_model_len
        max_blocks = -(-max_model_len // block_size)
        self.generation = np.full(num_slots, EMPTY, np.int32)
        self.num_tokens = np.zeros(num_slots, np.int32)
        """Tokens known or promised: those the request came with and one per sampling row launched since."""
        self.num_prompt = np.zeros(num_slots, np.int32)
        self.computed = np.zeros(num_slots, np.int32)
        """Positions launched; the next row starts here. EMPTY before the first row, which a prefix hit starts later.
        With speculation an upper bound, as if every draft were accepted: the device knows how many were."""
        self.unsettled = np.zeros(num_slots, np.int32)
        """Drafts launched: by so much `computed` may be ahead of where the next row is planned to start."""
        self.corrected = np.zeros(num_slots, np.bool_)
        """Whether a row came to another end than planned: further rows of this generation are void."""
        self.num_blocks = np.zeros(num_slots, np.int32)
        self.block_table = np.zeros((num_slots, max_blocks), np.int32)
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_p = np.ones(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.seed = np.zeros(num_slots, np.uint64)
        self.banned_until = np.zeros(num_slots, np.int32)
        """`banned` ids cannot be sampled while the sequence has fewer tokens than this (prompt + min_tokens)."""
        self.banned: list[tuple[int, ...]] = [()] * num_slots
        self.params: list[SamplingParams] = [_GREEDY] * num_slots
        """Whole, for what is rare; what every step reads is in columns."""
        self.penalized = np.zeros(num_slots, np.bool_)
        """Whether tokens that were said before change what may follow (`SamplingParams.penalizes`)."""
        self.edited = np.zeros(num_slots, np.bool_)
        """Whether `logit_bias`, `bad_words` or `allowed_token_ids` do."""
        self.logprobs = np.full(num_slots, NONE, np.int32)
        """Alternatives asked for at each sampled token; NONE: not even the token's own."""
        self.prompt_logprobs = np.full(num_slots, NONE, np.int32)
        """The same at each prompt token."""
        self.pooling = np.zeros(num_slots, np.int8)
        """A `Pooling`."""

    # -- changes -------------------------------------------------------------------------------------------------

    def apply(self, step: SchedulerOutput) -> Rows:
        """Released slots, then new requests, then block columns, then the rows are checked and counted as launched.
        Void rows are not among those returned.

        Raises:
            PlanError: the plan names an empty or a taken slot, another generation, a position out of order, a token
                or block count that does not add up. The worker cannot go on after it.
            ProtocolError: a column is malformed.
        """
        plan = StepRows.from_message(step)
        self.release(plan.released)
        for request in step.new:
            self._assign(request)
        self._append_blocks(plan.block_slots, plan.block_ids)
        rows = self._without_void(Rows(*plan[:6]))
        self._settle(rows)
        self._check(rows)
        self.computed[rows.slots] = rows.ends
        self.num_tokens[rows.slots] += rows.samples + rows.drafts
        self.unsettled[rows.slots] += rows.drafts
        return rows

    def release(self, slots: I32) -> None:
        self._check_range(slots)
        for slot in slots:
            if self.generation[slot] == EMPTY:
                raise PlanError(f"slot {slot} is released, but nobody has it")
            self.generation[slot] = EMPTY
            self.corrected[slot] = False

    def correct(self, slot: int, frontier: int, sampled: bool) -> None:
        """The slot's row in the plan applied last comes to `frontier` and not to its planned end, where it was to be
        `sampled` or not. The scheduler learns that from the step's result; what it planned before is void."""
        self.computed[slot] = frontier
        self.num_tokens[slot] -= sampled
        self.corrected[slot] = True

    def _settle(self, rows: Rows) -> None:
        """Where drafts were rejected, the plan starts earlier than everything launched would end (spec 2(b) 3, 5)."""
        slots = rows.slots
        unsettled = self.unsettled[slots]
        if not unsettled.any():
            return
        back = np.where(self.computed[slots] == EMPTY, 0, self.computed[slots] - rows.starts)
        back = np.where((back >= 0) & (back <= unsettled), back, 0)
        self.computed[slots] -= back
        self.num_tokens[slots] -= back
        self.unsettled[slots] -= back

    def _without_void(self, rows: Rows) -> Rows:
        """A corrected slot waits for its next generation, which goes on from where the device came."""
        self._check_range(rows.slots)
        if not self.corrected.any():
            return rows
        corrected = self.corrected[rows.slots]
        void = corrected & (rows.generations == self.generation[rows.slots])
        next_one = rows.slots[corrected & (rows.generations == self.generation[rows.slots] + 1)]
        self.generation[next_one] += 1
        self.corrected[next_one] = False
        return rows.where(~void)

    def _assign(self, request: NewRequest) -> None:
        slot, params = request.slot, request.params
        self._check_range(np.array([slot], np.int32))
        if self.generation[slot] != EMPTY:
            raise PlanError(
                f"slot {slot} is given to generation {request.generation}, "
                f"but generation {self.generation[slot]} has not left it"
            )
        num_tokens = len(request.token_ids) // 4
        if not 0 < num_tokens <= self.max_model_len:
            raise PlanError(f"slot {slot}: {num_tokens} tokens, the context holds 1 to {self.max_model_len}")
        self.generation[slot] = request.generation
        self.num_tokens[slot], self.num_prompt[slot] = num_tokens, request.num_prompt_tokens
        self.computed[slot] = EMPTY
        self.unsettled[slot] = 0
        self.num_blocks[slot] = 0
        self.block_table[slot] = 0
        blocks = unpack(request.block_ids)
        self._append_blocks(np.full(len(blocks), slot, np.int32), blocks)
        self.temperature[slot], self.top_p[slot] = params.temperature, params.top_p
        self.top_k[slot], self.min_p[slot] = params.top_k, params.min_p
        self.seed[slot] = params.seed
        self.params[slot], self.pooling[slot] = params, request.pooling
        self.penalized[slot] = params.penalizes
        self.edited[slot] = bool(params.logit_bias or params.bad_words or params.allowed_token_ids)
        self.logprobs[slot] = NONE if params.logprobs is None else params.logprobs
        self.prompt_logprobs[slot] = NONE if params.prompt_logprobs is None else params.prompt_logprobs
        self.banned[slot] = params.eos_token_ids + params.stop_token_ids if params.min_tokens else ()
        self.banned_until[slot] = request.num_prompt_tokens + params.min_tokens

    def _append_blocks(self, slots: I32, blocks: I32) -> None:
        if not len(slots):
            return
        self._check_range(slots)
        if int(blocks.min()) < 0 or int(blocks.max()) >= self.total_blocks:
            bad = blocks[(blocks < 0) | (blocks >= self.total_blocks)][0]
            raise PlanError(f"block {bad} does not exist, the cache has {self.total_blocks}")
        for slot, block in zip(slots.tolist(), blocks.tolist(), strict=True):
            at = self.num_blocks[slot]
            if self.generation[slot] == EMPTY or at == self.block_table.shape[1]:
                raise PlanError(f"slot {slot} gets block {block}, but it is empty or its table is full")
            self.block_table[slot, at] = block
            self.num_blocks[slot] = at + 1

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_range(self, slots: I32) -> None:
        if len(slots) and (int(slots.min()) < 0 or int(slots.max()) >= self.num_slots):
            raise PlanError(f"slots {slots.tolist()}: only 0 to {self.num_slots - 1} exist")

    def _check(self, rows: Rows) -> None:
        slots = rows.slots
        if len(np.unique(slots)) != len(slots):
            raise PlanError(f"a slot stands in two rows: {sorted(slots.tolist())}")
        have, computed, known = self.generation[slots], self.computed[slots], self.num_tokens[slots]
        self._refuse(
            rows, have != rows.generations, "row of generation {want}, the slot has {have} (-1: empty)",
            want=rows.generations, have=have,
        )  # fmt: skip
        first = computed == EMPTY
        self._refuse(
            rows, ~first & (rows.starts != computed),
            "{count} positions from {start}, but {computed} are computed",
            start=rows.starts, count=rows.counts, computed=computed,
        )  # fmt: skip
        ends = rows.ends
        self._refuse(
            rows, (ends - rows.drafts > known) | (ends > self.max_model_len),
            "positions up to {end}, but only {known} tokens are known and the context holds {limit}",
            end=ends - rows.drafts, known=known, limit=np.full_like(ends, self.max_model_len),
        )  # fmt: skip
        self._refuse(
            rows, rows.samples != (ends - rows.drafts == known),
            "samples is {bit} for a row that ends at {end} of {known} tokens",
            bit=rows.samples, end=ends - rows.drafts, known=known,
        )  # fmt: skip
        held = self.num_blocks[slots] * self.block_size
        self._refuse(rows, ends > held, "ends at {end}, but its blocks hold {held}", end=ends, held=held)

    @staticmethod
    def _refuse(rows: Rows, bad: NDArray[np.bool_], text: str, **columns: NDArray[Any]) -> None:
        if bad.any():
            i = int(bad.argmax())
            values = {name: column[i] for name, column in columns.items()}
            raise PlanError(f"slot {rows.slots[i]}: {text.format(**values)}")
