"""The scheduling loop: the third layer of the scheduler, over lifecycle.py and results.py.

Names follow spec 0.1: T tokens known, P computed (optimistic), F in flight, H placeholders, C = P - F committed.
`schedule()` first chooses, on copies of columns, and then commits its choice as a whole: nothing is ever un-scheduled.
What is per request and per step is columns by slot; only requests that arrive, finish, prefill, are preempted or
need a block cost Python time of their own.
"""

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from protocol.codec import pack
from protocol.steps import GrammarOutput, NewRequest, SchedulerOutput
from services.scheduler.core.drafting import Drafting
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import PreemptionCause
from services.scheduler.core.request import Request, RequestStatus
from services.scheduler.core.results import Results
from services.scheduler.core.slots import DELIVER, LIVE, Column, Rows
from services.scheduler.grammar import Grammar
from services.scheduler.policies import BatchingPolicy, SchedulerView, StepBudget

_NO_ROWS = np.empty(0, np.int64)
_NO_TOKENS = np.empty(0, np.int32)

T = TypeVar("T", Rows, Column)


def _joined(parts: list[T]) -> T:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


_UNLIMITED = np.iinfo(np.int32).max


def _limit(budget: int | None) -> int:
    return _UNLIMITED if budget is None else budget


def _first(want: Column, rows: int) -> Column:
    """The first so many of those that want something: the others get nothing."""
    want[np.cumsum(want > 0) > rows] = 0
    return want


def _within(want: Column, budget: int) -> Column:
    """What the budget leaves of `want`, row after row."""
    before = np.cumsum(want, dtype=np.int32) - want
    left = np.maximum(budget - before, 0, dtype=np.int32)
    return np.minimum(want, left, out=want)


@dataclass(slots=True)
class _Choice:
    """What one `schedule()` call has decided so far."""

    slots: list[Rows] = field(default_factory=list)
    counts: list[Column] = field(default_factory=list)
    new: list[NewRequest] = field(default_factory=list)
    block_slots: Rows = field(default_factory=lambda: _NO_ROWS)
    block_ids: list[int] = field(default_factory=list)
    tokens_left: int = 0
    prefill_left: int = 0
    admitting: bool = True
    runner_reports: bool = False


class Scheduler(Results):
    """Single-threaded, clock-free. The engine calls `schedule`, then `update_from_output` in the order of dispatch."""

    def __init__(
        self,
        limits: Limits,
        policy: BatchingPolicy,
        epoch: int = 1,
        before: "Scheduler | None" = None,
        drafting: Drafting | None = None,
    ) -> None:
        """`before` is the scheduler of the epoch before, voided; `drafting` None: no speculation."""
        super().__init__(limits, epoch, before, drafting)
        self.policy = policy
        self._next_step = 1

    def schedule(self) -> tuple[InflightStep, SchedulerOutput] | None:
        """The next step and its ledger entry, or None when nothing can be scheduled now. Waits for nothing (S1-13)."""
        self._displace()
        view = self._view()
        budget = self.policy.begin(view)
        choice = _Choice(
            tokens_left=budget.tokens,
            prefill_left=_limit(budget.prefill),
            runner_reports=budget.runner_reports,
        )
        self._choose_running(choice, budget, view)
        if choice.admitting:
            self._admit_waiting(choice, budget)
        return self._dispatch(choice) if choice.slots else None

    def _view(self) -> SchedulerView:
        return SchedulerView(
            self.running, self.slots, self.ledger, self.waiting, self.kv, self.limits, self._next_step
        )

    def _slices(self, rows: Rows, budget: StepBudget) -> Column:
        """Tokens per row: spec 0.3, then the chunk limit, then the step's budgets in order. 0: skipped this step."""
        want = self.slots.wanted(rows, self._next_step, self.limits.stages)
        np.minimum(want, budget.chunk, out=want)
        if budget.decodes is not None or budget.prefill is not None:
            decodes = self.slots.decoding(rows)
            want[decodes] = _first(want[decodes], _limit(budget.decodes))
            want[~decodes] = _within(want[~decodes], _limit(budget.prefill))
        return _within(want, budget.tokens)

    def _choose_running(self, choice: _Choice, budget: StepBudget, view: SchedulerView) -> None:
        """Rows and blocks of running requests, in order, preempting from the end while blocks are short."""
        while True:
            rows = self.policy.order(view)
            counts = self._slices(rows, budget)
            missing = self.kv.missing(rows, self.limits.held(self.slots.computed.take(rows) + counts))
            short = int(np.searchsorted(np.cumsum(missing), self.kv.pool.num_free, side="right"))
            if short == len(rows):
                break
            choice.admitting = False
            victim = int(self.running[-1])
            if self._fences or self.ledger.names(victim):
                # The next result frees blocks; preempting now would free none earlier (spec 0.7, fence).
                rows, counts, missing = rows[:short], counts[:short], missing[:short]
                break
            self.preempt(victim, PreemptionCause.BLOCKS)
            view = self._view()
        taken = counts > 0
        if not taken.all():
            rows, counts, missing = rows[taken], counts[taken], missing[taken]
        if not len(rows):
            return
        short_of = missing > 0
        if short_of.any():
            choice.block_ids = self.kv.grow(rows[short_of], missing[short_of])
            choice.block_slots = np.repeat(rows, missing)
        if not budget.runner_reports:
            self._register_known(rows, counts)
        choice.slots.append(rows)
        choice.counts.append(counts)
        choice.tokens_left -= int(counts.sum())
        if budget.prefill is not None:
            choice.prefill_left -= int(counts[~self.slots.decoding(rows)].sum())

    def _register_known(self, rows: Rows, counts: Column) -> None:
        """Eager registration: chunks of tokens that are known enter the prefix cache with their dispatch."""
        s = self.slots
        chunk = (counts > 1) & ~s.decoding(rows)
        if chunk.any():
            rows = rows[chunk]
            self.kv.register(rows, np.minimum(s.computed[rows] + counts[chunk], s.tokens[rows]))

    def _admit_waiting(self, choice: _Choice, budget: StepBudget) -> None:
        """Moves requests from waiting to running while seats, slots, tokens and blocks last; no bypass of a request
        that lacks blocks, but one that waits for its stale rows lets others pass (S1-14)."""
        seats = min(
            self.limits.max_num_seqs - len(self.running), len(self.slots.free), _limit(budget.admissions)
        )
        for request in self.waiting.in_order():
            room = min(choice.tokens_left, choice.prefill_left)
            if room <= 0 or seats <= 0:
                break
            if request.stale_rows:
                continue
            prefix = self.kv.find_prefix(request)
            hit = len(prefix) * self.limits.block_size
            hit, count = self.policy.admit(
                self._view(), request, hit, min(len(request.token_ids) - hit, budget.chunk, room)
            )
            count = min(count, room)
            del prefix[hit // self.limits.block_size :]
            end = np.array([len(request.token_ids) if budget.runner_reports else hit + count], np.int32)
            if not count or not self.kv.can_admit(prefix, int(self.limits.held(end)[0])):
                break
            self._admit(request, prefix, hit, count, choice)
            seats -= 1

    def _admit(self, request: Request, prefix: list[int], hit: int, count: int, choice: _Choice) -> None:
        self.waiting.remove(request)
        tokens = request.token_ids
        slot = self.slots.assign(request, self.limits.max_model_len)
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = min(hit, request.num_prompt_tokens)
            request.scheduled = self.now
        request.become(RequestStatus.RUNNING)
        request.token_ids = _NO_TOKENS
        self.kv.adopt(slot, prefix)
        row = np.array([slot], np.int64)
        end = np.array([hit + count], np.int32)
        if choice.runner_reports:
            self.kv.grow(row, self.kv.missing(row, np.array([len(tokens)], np.int32)))
        else:
            self.kv.grow(row, self.kv.missing(row, self.limits.held(end)))
            self.kv.register(row, end)
        self.slots.computed[slot] = hit
        self.kv.queries += len(tokens)
        self.kv.hits += hit
        self.running = np.insert(
            self.running, np.searchsorted(self.slots.rank[self.running], request.rank), slot
        )
        choice.new.append(
            NewRequest(
                slot,
                int(self.slots.generation[slot]),
                pack(tokens),
                request.num_prompt_tokens,
                pack(self.kv.tables[slot]),
                request.params,
                request.pooling,
            )
        )
        choice.slots.append(row)
        choice.counts.append(np.array([count], np.int32))
        choice.tokens_left -= count
        choice.prefill_left -= count

    def _displace(self) -> None:
        """A request of strictly better priority takes the seat of the worst running one, whose tokens in flight are
        still delivered. KV pressure is not a reason: see the fence rule (spec 0.7)."""
        head = self.waiting.head()
        if head is None or len(self.running) < self.limits.max_num_seqs or head.stale_rows:
            return
        worst = int(self.running[-1])
        if Request.priority_of(head.rank) < Request.priority_of(int(self.slots.rank[worst])):
            self.preempt(worst, PreemptionCause.PRIORITY)

    def _dispatch(self, choice: _Choice) -> tuple[InflightStep, SchedulerOutput]:
        """Takes the step id, snapshots the plan, and only then advances the columns (spec 0.5 D)."""
        s = self.slots
        slots, counts = _joined(choice.slots), _joined(choice.counts)
        starts = s.computed.take(slots)
        drafts = starts + counts - (s.tokens.take(slots) + s.placeholders.take(slots))
        samples = drafts >= 0
        np.maximum(drafts, 0, out=drafts)
        proposes = self.drafting.length(len(slots)) if self.drafting and samples.any() else 0
        step = InflightStep(
            self._next_step, slots, s.generation.take(slots), starts, counts, samples, drafts, proposes
        )
        plan = SchedulerOutput(
            epoch=self.epoch,
            step_id=step.step_id,
            slots=pack(slots.astype(np.int32)),
            generations=pack(step.generations),
            starts=pack(starts),
            counts=pack(counts),
            samples=samples.tobytes(),
            new=choice.new,
            block_slots=pack(choice.block_slots.astype(np.int32)),
            block_ids=pack(choice.block_ids),
            released=pack(self._released),
            has_structured_output_requests=bool((samples & s.constrained.take(slots)).any()),
            drafts=pack(drafts) if drafts.any() else b"",
            num_speculative_tokens=proposes,
            least_chance=self.drafting.least_chance if self.drafting and proposes else 0.0,
            report_times=self.observers.rank_times,
        )
        self._released.clear()
        self._next_step += 1
        self.ledger.add(step)
        return step, plan

    def grammar_output(self, step: InflightStep, vocab_size: int) -> GrammarOutput | None:
        """What the constrained rows of the step dispatched last may sample; None while one of them has a token of an
        earlier step in flight, for its grammar stands before that token. A row whose result will be ignored is free.

        A row with drafts has a mask for each position that a draft within the grammar leads to (spec 2(b) 13, 14)."""
        s = self.slots
        rows = step.samples & s.constrained.take(step.slots)
        slots, drafts = step.slots[rows], step.drafts[rows]
        counts = self.ledger.current(step)[rows] & np.isin(s.state.take(slots), (LIVE, DELIVER))
        if (counts & (s.sampling.take(slots) > 1)).any():
            return None
        masks = np.empty((len(slots) + int(drafts.sum()), -(-vocab_size // 32)), np.int32)
        widths, at = np.ones(len(slots), np.int32), 0
        for row, (slot, num_drafts, is_wanted) in enumerate(
            zip(slots.tolist(), drafts.tolist(), counts.tolist(), strict=True)
        ):
            if not is_wanted:
                masks[at] = -1
            elif not num_drafts:
                self._grammar(s.request(slot)).fill(masks[at])
            else:
                known = s.request(slot).draft_ids[:num_drafts].tolist()
                widths[row] = self._grammar(s.request(slot)).look_ahead(known, masks[at:])
            at += int(widths[row])
        return GrammarOutput(
            self.epoch,
            step.step_id,
            pack(slots.astype(np.int32)),
            masks[:at].view(np.uint8).reshape(-1).data,
            pack(widths) if drafts.any() else b"",
        )

    @staticmethod
    def _grammar(request: Request) -> Grammar:
        if request.grammar is None:
            raise KeyError(f"request {request.client}/{request.number} has no grammar")
        return request.grammar
