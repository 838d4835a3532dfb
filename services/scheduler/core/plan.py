"""Forming a step.

`StepPlanner.schedule` first chooses rows and then commits the choice as a whole; nothing is ever un-scheduled. What is
per request and step is columns by slot: only requests that arrive, finish, prefill, are preempted or need a block cost
Python time of their own. The planner has no state; it acts on the `RequestStore` and the `EpochState`.

Its public methods are the parts of forming a step, in the order in which `schedule` calls them. Tests override single
ones to inject faults (tests/simulation/faults.py).
"""

from dataclasses import dataclass, field

import numpy as np

from protocol.codec import MAX_MESSAGE_BYTES, encode, pack
from protocol.columns import has_all, has_any, indices, total
from protocol.steps import NewRequest, SchedulerOutput
from services.scheduler.core.drafting import NO_DRAFTING, Drafting
from services.scheduler.core.encoding import encodable
from services.scheduler.core.epoch import EpochState
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.observer import PreemptionCause
from services.scheduler.core.request import Request, RequestStatus, priority_of
from services.scheduler.core.slots import Column, SlotIds
from services.scheduler.core.store import RequestStore
from services.scheduler.core.waiting import WaitingQueue
from services.scheduler.policies import SchedulerView, StepBudget

_NO_TOKENS = np.empty(0, np.int32)
_UNLIMITED = np.iinfo(np.int32).max
MAX_NEW_BYTES = MAX_MESSAGE_BYTES // 2
"""Tokens, parameters and media of the requests that enter with one plan, unless a single one has more: the plan must
not become too large to send."""


@dataclass(slots=True)
class StepChoice:
    """Rows and blocks that one `schedule()` call has chosen so far."""

    tokens_left: int
    prefill_left: int
    runner_reports: bool
    encoder_left: int
    """Positions of items that the step can still encode."""
    slots: list[SlotIds] = field(default_factory=list)
    counts: list[Column] = field(default_factory=list)
    new: list[NewRequest] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    block_slots: SlotIds = field(init=False)
    """The slot of each of `block_ids`, if there are any."""
    admitting: bool = True
    new_bytes: int = 0
    num_tokens: int = 0
    """Sum of `counts`."""

    def add(self, slots: SlotIds, counts: Column, num_tokens: int) -> None:
        self.slots.append(slots)
        self.counts.append(counts)
        self.num_tokens += num_tokens
        self.tokens_left -= num_tokens


@dataclass(eq=False)
class StepPlanner:
    """Single-threaded and clock-free; waits for nothing (non-blocking schedule)."""

    store: RequestStore
    epoch: EpochState
    lifecycle: Lifecycle
    drafting: Drafting

    def schedule(self) -> tuple[InflightStep, SchedulerOutput] | None:
        """Form the next step and enter it in the ledger. Return it and its plan; None: nothing can be scheduled."""
        alone = self.suspect()
        if alone is None:
            self.displace()
        elif self.epoch.fences:
            return None  # rows of another request are in flight, and a loss in them would count against the suspect
        view = self.epoch.view(self.candidates(alone))
        budget = self.epoch.policy.begin(view)
        choice = StepChoice(
            budget.tokens, _limit(budget.prefill), budget.runner_reports, self.epoch.limits.encoder_budget
        )
        self.choose_running(choice, budget, view)
        if choice.admitting and len(view.waiting):
            self.admit_waiting(choice, budget, view.waiting)
        return self.commit(choice) if choice.slots else None

    def suspect(self) -> Request | None:
        """Return the request that must run alone; None: there is none (suspects)."""
        suspects, slots = self.store.suspects, self.epoch.slots
        while suspects.active:
            key = next(iter(suspects.active))
            request = self.store.requests[key]
            is_running = request.status is RequestStatus.RUNNING
            if not suspects.check(key, int(slots.tokens[request.slot]) if is_running else len(request.token_ids)):
                return request
            if is_running and suspects.active:
                self.lifecycle.preempt(request.slot, PreemptionCause.SUSPECT)
        return None

    def candidates(self, alone: Request | None) -> WaitingQueue:
        """Return the requests that may be admitted; the policy sees no others. `alone`: the only one that may run."""
        if alone is None:
            return self.store.waiting
        queue = WaitingQueue()
        if alone.status is not RequestStatus.RUNNING:
            queue.add(alone)
        return queue

    def displace(self) -> None:
        """Preempt the worst running request if all seats are taken and the head of the queue has a strictly better
        priority. A lack of blocks is no reason (no in-flight preemption)."""
        epoch, head = self.epoch, self.store.waiting.head()
        if head is None or len(epoch.running) < epoch.limits.max_num_seqs:
            return
        if next(epoch.view(self.store.waiting).candidates(), None) is not head:
            return
        worst = int(epoch.running[-1])
        if priority_of(head.order_key) < priority_of(int(epoch.slots.order_key[worst])):
            if epoch.loads.wait_for(head, epoch.kv.find_prefix(head)):
                return
            self.lifecycle.preempt(worst, PreemptionCause.PRIORITY)

    # -- running requests ----------------------------------------------------------------------------------------

    def choose_running(self, choice: StepChoice, budget: StepBudget, view: SchedulerView) -> None:
        """Choose rows and take blocks of running requests, in the policy's order; while blocks are short, end the last
        load, else preempt the last running request."""
        epoch = self.epoch
        while True:
            rows = epoch.policy.order(view)
            counts = self.slices(rows, budget)
            missing = epoch.kv.missing(rows, epoch.limits.held(epoch.slots.computed[rows] + counts))
            if missing is None or total(missing) <= epoch.kv.num_free:
                break
            short = int(missing.cumsum().searchsorted(epoch.kv.num_free, side="right"))
            choice.admitting = False
            if (load := self.store.loading.last) is not None:
                epoch.loads.end(load, 0)
                continue
            victim = int(epoch.running[-1])
            if epoch.fences or epoch.ledger.names(victim):
                # No in-flight preemption: the next result frees blocks, and preempting now frees none earlier.
                rows, counts, missing = rows[:short], counts[:short], missing[:short]
                break
            self.lifecycle.preempt(victim, PreemptionCause.BLOCKS)
            view = epoch.view(view.waiting)
        taken = counts > 0
        if not has_all(taken):
            rows, counts = rows[taken], counts[taken]
            missing = None if missing is None else missing[taken]
        if not len(rows):
            return
        if missing is not None and has_any(short_of := missing > 0):
            choice.block_ids = epoch.kv.grow(rows[short_of], missing[short_of])
            choice.block_slots = np.repeat(rows, missing)
        choice.encoder_left = self.encode(rows, counts)
        num_tokens = total(counts)
        if num_tokens > len(rows) and not budget.runner_reports:
            self.register_known(rows, counts)
        choice.add(rows, counts, num_tokens)
        if budget.prefill is not None:
            choice.prefill_left -= int(counts[~epoch.slots.decoding(rows)].sum())

    def slices(self, rows: SlotIds, budget: StepBudget) -> Column:
        """Positions per row (slice size): what the slot could compute, limited by the chunk and, row after row, by the
        budgets of the step. 0: the row is left out."""
        slots = self.epoch.slots
        want = slots.wanted(rows, self.epoch.next_step, self.epoch.limits.stages)
        most = min(budget.chunk, budget.tokens)
        is_limited = total(want) > most
        if is_limited:
            np.minimum(want, most, out=want)
        if budget.decodes is not None or budget.prefill is not None:
            decodes = slots.decoding(rows)
            want[decodes] = _first(want[decodes], _limit(budget.decodes))
            want[~decodes] = _within(want[~decodes], _limit(budget.prefill))
        if is_limited:
            want = _within(want, budget.tokens)
        self.encode(rows, want)
        if self.epoch.limits.takes_back_states:  # no more than the sampled position may be computed again
            known = slots.tokens[rows] + slots.placeholders[rows] - slots.computed[rows]
            want -= slots.constrained[rows] & (want > 1) & (want == known)
        return want

    def encode(self, rows: SlotIds, counts: Column) -> int:
        """End rows before the first item for which the encoder has no budget in this step (encoder budget). Return what
        is left of the budget."""
        slots, left = self.epoch.slots, self.epoch.limits.encoder_budget
        if not left:
            return 0
        starts = slots.computed[rows]
        for row in np.flatnonzero((starts < slots.media_end[rows]) & (counts > 0)).tolist():
            items, start = slots.request(int(rows[row])).items, int(starts[row])
            end, left = encodable(items, start, start + int(counts[row]), left, is_first=False)
            counts[row] = end - start
        return left

    def register_known(self, rows: SlotIds, counts: Column) -> None:
        """Eager registration: chunks of known tokens enter the prefix cache with their dispatch."""
        slots = self.epoch.slots
        if has_any(chunk := (counts > 1) & ~slots.decoding(rows)):
            rows = rows[chunk]
            self.epoch.kv.register(rows, np.minimum(slots.computed[rows] + counts[chunk], slots.tokens[rows]))

    # -- waiting requests ----------------------------------------------------------------------------------------

    def admit_waiting(self, choice: StepChoice, budget: StepBudget, waiting: WaitingQueue) -> None:
        """Admit requests while seats, slots, tokens and blocks last. Nobody passes a request that lacks blocks
        (admission order).

        A prompt that must be whole takes what is left of the step, whatever chunk and share the policy allows, and
        waits for the next step if that is too little (whole prompt).

        Args:
            waiting: the requests that may be admitted.
        """
        epoch = self.epoch
        limits, kv = epoch.limits, epoch.kv
        seats = limits.max_num_seqs - len(epoch.running)
        seats = min(seats, len(epoch.slots.free), _limit(budget.admissions))
        for request in epoch.view(waiting).candidates():
            room, chunk = min(choice.tokens_left, choice.prefill_left), budget.chunk
            if room <= 0 or seats <= 0:
                break
            if limits.whole_prompts:
                room = chunk = limits.max_num_batched_tokens - choice.num_tokens
            prefix = kv.find_prefix(request)
            if epoch.loads.wait_for(request, prefix):
                continue
            longest = kv.covered(prefix)
            offered = self.offered(request, longest, min(chunk, room))
            view = epoch.view(waiting)
            hit, count = epoch.policy.admit(view, request, longest, offered)
            if hit < longest:
                prefix = kv.shortened(request, prefix, hit)
                if kv.covered(prefix) < hit:  # a window's blocks are missing there: no hit is always possible
                    offered = self.offered(request, 0, min(chunk, room))
                    prefix, (hit, count) = [], epoch.policy.admit(view, request, 0, offered)
            count = min(count, room)
            reached, encoder_left = encodable(request.items, hit, hit + count, choice.encoder_left, is_first=True)
            count = reached - hit
            end = np.array([len(request.token_ids) if budget.runner_reports else hit + count], np.int32)
            held = limits.held(end)
            if not count or kv.num_missing(prefix, int(held[0])) > kv.num_free:
                break
            if limits.whole_prompts and count < len(request.token_ids):
                break
            size = _entry_bytes(request)
            if choice.new and choice.new_bytes + size > MAX_NEW_BYTES:
                break
            self.admit(request, prefix, count, held, choice)
            choice.encoder_left = encoder_left
            choice.new_bytes += size
            seats -= 1

    def offered(self, request: Request, hit: int, most: int) -> int:
        """Return how many of at most `most` positions behind a hit the first row of a request may have: the one that it
        samples at belongs to a row of its own if that row may be taken back (recurrent state)."""
        left = len(request.token_ids) - hit
        samples_apart = self.epoch.limits.takes_back_states and request.grammar is not None and left > 1
        return min(left - samples_apart, most)

    def admit(self, request: Request, prefix: list[int], count: int, held: Column, choice: StepChoice) -> None:
        """Move a request from the queue to a slot with blocks for `held` tokens, int32[1]; its first row computes
        `count` positions behind `prefix`."""
        store, epoch = self.store, self.epoch
        kv, tokens, hit = epoch.kv, request.token_ids, epoch.kv.covered(prefix)
        store.waiting.remove(request)
        slot = epoch.enter(request, prefix)
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = min(hit, request.num_prompt_tokens)
            request.scheduled = store.now
        request.become(RequestStatus.RUNNING)
        request.asked = False
        request.token_ids = _NO_TOKENS
        row = np.array([slot], np.int64)
        if (missing := kv.missing(row, held)) is not None:
            kv.grow(row, missing)
        if not choice.runner_reports:
            kv.register(row, np.array([hit + count], np.int32))
        store.counters["prefix_cache_queries"] += len(tokens)
        store.counters["prefix_cache_hits"] += hit
        choice.new.append(
            NewRequest(
                slot,
                int(epoch.slots.generation[slot]),
                pack(tokens),
                request.num_prompt_tokens,
                pack(kv.states[slot] + kv.tables[slot]),
                request.params,
                request.pooling,
                request.request_id,
                request.lora,
                request.pooling_params,
                request.media,
            )
        )
        choice.add(row, np.array([count], np.int32), count)
        choice.prefill_left -= count

    # -- the plan ------------------------------------------------------------------------------------------------

    def commit(self, choice: StepChoice) -> tuple[InflightStep, SchedulerOutput]:
        """Take the step id and build the plan from copies of the columns; only then do the columns advance (plan
        snapshot)."""
        epoch, s = self.epoch, self.epoch.slots
        (slots, *_), (counts, *_) = choice.slots, choice.counts
        if len(choice.slots) > 1:
            slots, counts = np.concatenate(choice.slots), np.concatenate(choice.counts)
        starts = s.computed[slots]
        drafts = starts + counts - s.tokens[slots] - s.placeholders[slots]
        samples = drafts >= 0
        sampled = samples.tobytes()
        if (num_samples := sampled.count(1)) < len(slots):
            np.maximum(drafts, 0, out=drafts)
        drafting = self.drafting if num_samples else NO_DRAFTING
        proposes = drafting.length(num_samples)
        unmasked: dict[int, int] = {}
        if s.num_special:
            masked = indices(samples & s.constrained[slots])
            unmasked = dict(zip(slots[masked].tolist(), masked.tolist(), strict=True))
        step = InflightStep(
            epoch.next_step,
            slots,
            s.generation[slots],
            starts,
            counts,
            samples,
            drafts,
            choice.num_tokens,
            proposes,
            drafting.is_trial,
            drafting.rests,
            unmasked,
        )
        plan = SchedulerOutput(
            epoch=epoch.number,
            step_id=step.step_id,
            slots=slots.astype(np.int32).tobytes(),
            generations=step.generations.tobytes(),
            starts=starts.tobytes(),
            counts=counts.tobytes(),
            samples=sampled,
            new=choice.new,
            block_slots=pack(choice.block_slots.astype(np.int32)) if choice.block_ids else b"",
            block_ids=pack(choice.block_ids),
            released=pack(epoch.take_released()),
            has_structured_output_requests=bool(unmasked),
            drafts=drafts.tobytes() if has_any(drafts) else b"",
            num_speculative_tokens=proposes,
            min_acceptance=drafting.min_acceptance if proposes else 0.0,
            report_times=self.store.observers.rank_times,
            masked=pack([*unmasked]),
            whole=epoch.kv.take_whole(),
            speculation_rests=step.rests,
            completes=epoch.kv.take_completed(epoch.limits.fetches_blocks),
        )
        epoch.next_step += 1
        epoch.ledger.add(step)
        return step, plan


def _entry_bytes(request: Request) -> int:
    """Return the bytes of a request in the plan with which it enters a slot, about."""
    media = len(request.media.data) if request.media is not None else 0
    return request.token_ids.nbytes + len(encode(request.params)) + media


def _limit(budget: int | None) -> int:
    return _UNLIMITED if budget is None else budget


def _first(want: Column, rows: int) -> Column:
    """Keep the first `rows` rows that want something; the others get 0."""
    want[np.cumsum(want > 0) > rows] = 0
    return want


def _within(want: Column, budget: int) -> Column:
    """Limit the sum of `want` to the budget, row after row."""
    if total(want) <= budget:
        return want
    before = np.cumsum(want, dtype=np.int32) - want
    left = np.maximum(budget - before, 0, dtype=np.int32)
    return np.minimum(want, left, out=want)
