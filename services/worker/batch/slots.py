"""A worker's batch on the host: columns with one entry per slot, changed by plans alone.

Every backend applies a plan through `SlotTable.apply`, so plans are checked in one place. The columns hold what the
host knows without reading from the device: numbers of tokens, never sampled ids.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.columns import I32 as I32
from protocol.kv_groups import NO_BLOCK, ONE_GROUP, KVGroup, num_states
from protocol.rows import Rows as Rows
from protocol.rows import StepRows
from protocol.sampling import SamplingParams
from protocol.steps import NewRequest, SchedulerOutput
from services.worker.batch.row_check import EMPTY as EMPTY
from services.worker.batch.row_check import CountRows, count_rows

NONE = -1
"""Number of log-probabilities of a request that did not request any."""
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class PlanError(RuntimeError):
    """A plan contradicts this worker's batch: the scheduler and the worker no longer agree."""


def spread(counts: I32) -> tuple[I32, I32]:
    """Return the row of each token and its index in the row, int32[sum(counts)] each. `counts`: int32[rows], tokens of
    each row."""
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    firsts = np.cumsum(counts, dtype=np.int32) - counts
    return owners, np.arange(len(owners), dtype=np.int32) - firsts[owners]


class BatchColumns:
    """Columns of `num_slots` entries; int32 unless stated. Every column is reset when a slot is assigned.

    The part of the batch that the computation of a step reads. `SlotTable` checks changes.
    """

    def __init__(
        self, num_slots: int, block_size: int, max_model_len: int, groups: Sequence[KVGroup] = ONE_GROUP
    ) -> None:
        self.num_slots, self.block_size, self.max_model_len = num_slots, block_size, max_model_len
        self.groups, self.num_states = groups, num_states(groups)
        self.num_groups = len(groups) - self.num_states
        """Groups with keys."""
        self.has_windows = any(group.size for group in groups)
        self.max_blocks = max_blocks = -(-max_model_len // block_size)
        """Blocks of a table."""
        self.generation = np.full(num_slots, EMPTY, np.int32)
        self.num_prompt = np.zeros(num_slots, np.int32)
        self.num_blocks = np.zeros(num_slots, np.int32)
        """Blocks of each group, those behind its window included."""
        self.block_table = np.zeros((num_slots, max_blocks * self.num_groups), np.int32)
        """The tables of all groups, one after the other, each with `max_blocks` entries; 0 where there is no block."""
        self.states = np.zeros((num_slots, self.num_states), np.int32)
        """Blocks with the recurrent states."""
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_p = np.ones(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.seed = np.zeros(num_slots, np.uint64)
        self.banned_until = np.zeros(num_slots, np.int32)
        """Length (prompt + min_tokens) below which the ids in `banned` cannot be sampled."""
        self.banned: list[tuple[int, ...]] = [()] * num_slots
        self.params: list[SamplingParams] = [_GREEDY] * num_slots
        """All parameters, for those that few requests use; parameters that every step reads have columns."""
        self.penalized = np.zeros(num_slots, np.bool_)
        """True for a request with penalties (`SamplingParams.penalizes`): earlier tokens change the logits."""
        self.edited = np.zeros(num_slots, np.bool_)
        """True for a request with `logit_bias`, `bad_words` or `allowed_token_ids`."""
        self.logprobs = np.full(num_slots, NONE, np.int32)
        """Alternatives to report with each sampled token; NONE: no log-probability at all."""
        self.prompt_logprobs = np.full(num_slots, NONE, np.int32)
        """Alternatives to report with each prompt token; NONE: no log-probability at all."""
        self.pooling = np.zeros(num_slots, np.int8)
        """A `Pooling`."""

    def apply_changes(self, plan: StepRows, new: Sequence[NewRequest]) -> None:
        """Apply the changes of a plan that a `SlotTable` has accepted: release slots, assign requests, append blocks.

        Nothing is kept of the plan's arrays."""
        self.release(plan.released)
        for request in new:
            self.assign(request)
        self.append_blocks(plan.block_slots, plan.block_ids)

    def release(self, slots: I32) -> None:
        if len(slots):
            self.generation[slots] = EMPTY

    def assign(self, request: NewRequest) -> None:
        slot, params = request.slot, request.params
        self.generation[slot], self.num_prompt[slot] = request.generation, request.num_prompt_tokens
        blocks = unpack(request.block_ids)
        if self.num_states:
            self.states[slot], blocks = blocks[: self.num_states], blocks[self.num_states :]
        if self.num_groups == 1 and not self.has_windows:
            self.block_table[slot, : len(blocks)], self.block_table[slot, len(blocks) :] = blocks, 0
        else:
            by_group = np.maximum(blocks.reshape(-1, self.num_groups).T, 0)  # nobody reads behind a window
            self.block_table[slot] = 0
            self.block_table[slot].reshape(self.num_groups, -1)[:, : by_group.shape[1]] = by_group
        self.num_blocks[slot] = len(blocks) // self.num_groups
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

    def append_blocks(self, slots: I32, blocks: I32) -> None:
        """Raises: PlanError, for an empty slot or a full block table."""
        by_position: list[Any] = blocks.tolist() if self.num_groups == 1 else [*blocks.reshape(-1, self.num_groups)]
        for slot, block in zip(slots[:: self.num_groups].tolist(), by_position, strict=True):
            at = self.num_blocks[slot]
            if self.generation[slot] == EMPTY or at == self.max_blocks:
                raise self._full(slot, block)
            self.block_table[slot, at :: self.max_blocks] = block
            self.num_blocks[slot] = at + 1

    @staticmethod
    def _full(slot: int, block: int) -> PlanError:
        return PlanError(f"block {block} is appended to slot {slot}, which is empty or has a full block table")


class SlotTable(BatchColumns):
    """The batch of the host, which checks plans: beside the columns, what was launched for every slot.

    Args:
        leaves_rows_out: constrained rows may be left out (left-out row, docs/invariants.md)
        count_rows: the check of rows, which a backend may have compiled
        groups: groups of KV cache, each with a block table
    """

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        leaves_rows_out: bool = False,
        count_rows: CountRows = count_rows,
        groups: Sequence[KVGroup] = ONE_GROUP,
    ) -> None:
        super().__init__(num_slots, block_size, max_model_len, groups)
        self._leaves_rows_out, self._count_rows = leaves_rows_out, count_rows
        self.total_blocks = num_blocks
        self.num_tokens = np.zeros(num_slots, np.int32)
        """Tokens known or promised: those in the request's message, and one per sampling row launched since."""
        self.computed = np.zeros(num_slots, np.int32)
        """Positions launched, which is the start of the next row. EMPTY before the first row, which starts after the
        prefix hit. It is an upper bound, as if every draft were accepted and no row were left out: only the device
        knows the true position (docs/invariants.md)."""
        self.unsettled = np.zeros(num_slots, np.int32)
        """Drafts, and tokens of rows that may be left out, launched and not settled. `computed` exceeds the planned
        start of the next row by at most this."""
        self._row_of = np.zeros(num_slots, np.intp)
        """See `row_check.count_rows`."""

    # -- changes -------------------------------------------------------------------------------------------------

    def apply(self, step: SchedulerOutput) -> Rows:
        """Apply a plan: release slots, assign new requests, append blocks, then check the rows and count them as
        launched. Return the rows.

        Raises:
            PlanError: the plan names an empty or an occupied slot, another generation, a position out of order, or a
                count of tokens or blocks that does not add up. The worker cannot continue after it.
            ProtocolError: a column is malformed.
        """
        return self.apply_plan(StepRows.from_message(step), step.new)

    def apply_plan(self, plan: StepRows, new: Sequence[NewRequest]) -> Rows:
        """Apply a plan whose columns are unpacked; see `apply`."""
        self.apply_changes(plan, new)
        rows = plan.rows
        columns = self.generation, self.num_blocks, self.num_tokens, self.computed, self.unsettled
        sizes = self._row_of, self.block_size, self.max_model_len
        if not self._count_rows(*vars(rows).values(), *columns, *sizes):
            self._explain(rows)
        if self._leaves_rows_out and len(plan.masked):
            self.unsettled[plan.masked] += 1
        return rows

    def release(self, slots: I32) -> None:
        """Empty slots. Raises: PlanError, for a slot that is empty already."""
        self._check_range(slots)
        for slot in slots.tolist():
            if self.generation[slot] == EMPTY:
                raise PlanError(f"slot {slot} is released, but it is empty")
            self.generation[slot] = EMPTY

    def assign(self, request: NewRequest) -> None:
        """Raises: PlanError, for an occupied slot, no tokens or too many of them, or blocks that do not exist."""
        slot = request.slot
        if not 0 <= slot < self.num_slots:
            self._check_range(np.array([slot], np.int32))
        if self.generation[slot] != EMPTY:
            raise PlanError(
                f"slot {slot} is assigned to generation {request.generation}, "
                f"but generation {self.generation[slot]} was not released"
            )
        num_tokens = len(request.token_ids) // 4
        if not 0 < num_tokens <= self.max_model_len:
            raise PlanError(f"slot {slot}: {num_tokens} tokens, but the context holds 1 to {self.max_model_len}")
        blocks = unpack(request.block_ids)
        self._check_blocks(blocks[blocks != NO_BLOCK] if self.has_windows else blocks)
        self._check_groups(blocks[self.num_states :])
        if len(blocks) > (most := self.num_states + self.block_table.shape[1]):
            raise self._full(slot, int(blocks[most]))
        if self.num_states and (len(blocks) < self.num_states or NO_BLOCK in blocks[: self.num_states]):
            raise PlanError(f"slot {slot}: the request has {self.num_states} recurrent states, but not their blocks")
        super().assign(request)
        self.num_tokens[slot], self.computed[slot], self.unsettled[slot] = num_tokens, EMPTY, 0

    def append_blocks(self, slots: I32, blocks: I32) -> None:
        """Raises: PlanError, for an empty slot, a full block table, or a block that does not exist."""
        if not len(slots):
            return
        self._check_range(slots)
        self._check_blocks(blocks)
        self._check_groups(blocks)
        super().append_blocks(slots, blocks)

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_range(self, slots: I32) -> None:
        if len(slots) and (int(slots.min()) < 0 or int(slots.max()) >= self.num_slots):
            raise PlanError(f"slots {slots.tolist()}: only slots 0 to {self.num_slots - 1} exist")

    def _check_blocks(self, blocks: I32) -> None:
        if len(blocks) and (int(blocks.min()) < 0 or int(blocks.max()) >= self.total_blocks):
            bad = blocks[(blocks < 0) | (blocks >= self.total_blocks)][0]
            raise PlanError(f"block {bad} does not exist; the cache has {self.total_blocks}")

    def _check_groups(self, blocks: I32) -> None:
        if len(blocks) % self.num_groups:
            raise PlanError(f"{len(blocks)} blocks are not one of each of {self.num_groups} groups of KV cache")

    def _explain(self, rows: Rows) -> NoReturn:
        """Find what `count_rows` has refused. Raises: PlanError, for the first check that a row fails."""
        slots = rows.slots
        self._check_range(slots)
        if len(np.unique(slots)) != len(slots):
            raise PlanError(f"a slot has two rows in one step: {sorted(slots.tolist())}")
        have, computed, known = self.generation[slots], self.computed[slots], self.num_tokens[slots]
        self._refuse(
            rows, have != rows.generations, "row of generation {want}, but the slot has {have} (-1: empty)",
            want=rows.generations, have=have,
        )  # fmt: skip
        first = computed == EMPTY
        self._refuse(
            rows, ~first & (rows.starts != computed),
            "a row of {count} positions starts at {start}, but {computed} are computed",
            start=rows.starts, count=rows.counts, computed=computed,
        )  # fmt: skip
        ends = rows.ends
        self._refuse(
            rows, (ends - rows.drafts > known) | (ends > self.max_model_len),
            "a row ends at {end}, but only {known} tokens are known and the context holds {limit}",
            end=ends - rows.drafts, known=known, limit=np.full_like(ends, self.max_model_len),
        )  # fmt: skip
        self._refuse(
            rows, rows.samples != (ends - rows.drafts == known),
            "samples is {bit} for a row that ends at {end} of {known} tokens",
            bit=rows.samples, end=ends - rows.drafts, known=known,
        )  # fmt: skip
        held = self.num_blocks[slots] * self.block_size
        self._refuse(
            rows, ends > held, "a row ends at {end}, but its blocks hold {held} positions", end=ends, held=held
        )
        raise AssertionError("a check refuses rows that no explanation fits")

    @staticmethod
    def _refuse(rows: Rows, bad: NDArray[np.bool_], text: str, **columns: NDArray[Any]) -> None:
        if bad.any():
            i = int(bad.argmax())
            values = {name: column[i] for name, column in columns.items()}
            raise PlanError(f"slot {rows.slots[i]}: {text.format(**values)}")
