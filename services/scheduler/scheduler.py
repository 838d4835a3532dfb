"""The scheduling loop and the only place where confirmed tokens enter.

Names follow spec 0.1: T tokens known, P computed (optimistic), F in flight, H placeholders, C = P - F committed.
`schedule()` first chooses, on copies of columns, and then commits its choice as a whole: nothing is ever un-scheduled.
What is per request and per step is columns by slot; only requests that arrive, finish, prefill, are preempted or
need a block cost Python time of their own.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from protocol.codec import pack
from protocol.requests import Embedding, Finish, FinishReason
from protocol.rows import LogprobRows
from protocol.sampling import Pooling
from protocol.steps import GrammarOutput, NewRequest, ReleaseSlots, SchedulerOutput
from services.scheduler.grammar import Grammar
from services.scheduler.kv_cache import KVCacheManager
from services.scheduler.ledger import InflightStep, Ledger
from services.scheduler.limits import Limits
from services.scheduler.outputs import OutputBuffer
from services.scheduler.policies import BatchingPolicy, SchedulerView, StepBudget
from services.scheduler.request import Request, RequestStatus
from services.scheduler.slots import DELIVER, DROP, LIVE, NO_TOKEN, Column, Rows, SlotTable
from services.scheduler.waiting import WaitingQueue

_NO_ROWS = np.empty(0, np.int64)
_NO_TOKENS = np.empty(0, np.int32)
NO_EMBEDDINGS: Mapping[int, bytes] = MappingProxyType({})


T = TypeVar("T", Rows, Column)


def _joined(parts: list[T]) -> T:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


_UNLIMITED = np.iinfo(np.int32).max


def _limit(budget: int | None) -> int:
    return _UNLIMITED if budget is None else budget


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


class UnknownResult(Exception):
    """A worker's result does not match the oldest step in flight: worker and scheduler have lost each other."""


class Scheduler:
    """Single-threaded, clock-free. The engine calls `schedule`, then `update_from_output` in the order of dispatch."""

    def __init__(
        self, limits: Limits, policy: BatchingPolicy, epoch: int = 1, before: "Scheduler | None" = None
    ) -> None:
        """`before` is the scheduler of the epoch before, voided: its waiting requests, outputs and counters go on."""
        self.limits = limits
        self.policy = policy
        self.epoch = epoch
        self.slots = SlotTable(limits.num_slots, limits.max_model_len)
        self.ledger = Ledger(self.slots)
        self.kv = KVCacheManager(
            self.slots, limits.num_blocks, limits.block_size, limits.enable_prefix_caching
        )
        self.waiting: WaitingQueue = before.waiting if before else WaitingQueue()
        self.running: Rows = _NO_ROWS
        """Live slots in order of rank."""
        self.outputs: OutputBuffer = before.outputs if before else OutputBuffer()
        self.counters: Counter[str] = before.counters if before else Counter()
        if before:
            self.kv.queries, self.kv.hits = before.kv.queries, before.kv.hits
        self._fences: dict[int, list[int]] = {}
        """step_id -> retired slots that leave when that step was processed."""
        self._released: list[int] = []
        """Slots that left; the next message tells the worker."""
        self._next_step = 1

    # -- requests come and go ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self.waiting.add(request)

    def finish(self, request: Request, finish: Finish | None) -> None:
        """Ends a request in any state; `finish` None tells nobody (abort). What is in flight for it is ignored."""
        if request.status is RequestStatus.RUNNING:
            self._leave(request.slot, DROP)
        else:
            self.waiting.remove(request)
            if request.stale_rows:
                self._drop_stale(request)
        request.become(RequestStatus.FINISHED)
        self.counters["finished"] += 1
        if finish is not None:
            self.outputs.finish(request.client, finish)

    def preempt(self, slot: int, stale: int = DELIVER) -> None:
        """Back to waiting with every confirmed token; blocks go behind the fence. In-flight rows are delivered when
        they arrive, or dropped and sampled again (`stale=DROP`; the request may then resume at once)."""
        promised = int(self.slots.placeholders[slot]) if stale == DELIVER else 0
        request = self._return(slot, DELIVER if promised else DROP)
        request.stale_rows += promised
        request.num_preemptions += 1
        self.counters["preemptions"] += 1

    def _return(self, slot: int, stale: int) -> Request:
        """From running to waiting, with every confirmed token."""
        request = self.slots.request(slot)
        self._leave(slot, stale)
        request.become(RequestStatus.PREEMPTED)
        self.waiting.add(request)
        return request

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forgets every cached block; with `reset_running`, running requests are recomputed too (drop mode).
        False if requests that keep running still share blocks."""
        if reset_running:
            for slot in self.running.tolist()[::-1]:
                self.preempt(slot, stale=DROP)
        self.kv.pool.forget_all()
        return not len(self.running)

    def void(self) -> None:
        """The workers are lost: nothing in flight will return, no cached block is left. Running requests wait again
        with their confirmed tokens, and nothing keeps them from being resumed (spec 0.7)."""
        for slot in self.running.tolist():
            self._return(slot, DROP)
        for request in list(self.waiting):
            if request.stale_rows:
                self._drop_stale(request)
        self.ledger.steps.clear()
        for slots in self._fences.values():
            for slot in slots:
                self._free(slot)
        self._fences.clear()
        self._released.clear()
        self.kv.pool.forget_all()

    def _leave(self, slot: int, state: int) -> None:
        self.running = self.running[self.running != slot]
        self.slots.retire(slot, state)
        if self.ledger.names(slot):
            self._fences.setdefault(int(self.slots.last_step[slot]), []).append(slot)
        else:
            self._free(slot)

    def _free(self, slot: int) -> None:
        self.kv.release(slot)
        self.slots.release(slot)
        self._released.append(slot)

    def _drop_stale(self, request: Request) -> None:
        for slot, owner in enumerate(self.slots.owner):
            if owner is request and self.slots.state[slot] == DELIVER:
                self.slots.state[slot] = DROP
        request.stale_rows = 0

    # -- one step ------------------------------------------------------------------------------------------------

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

    def take_releases(self) -> ReleaseSlots | None:
        """What workers must still be told when no step is left to carry it (spec 0.4 L5)."""
        if not self._released:
            return None
        message = ReleaseSlots(self.epoch, pack(self._released))
        self._released.clear()
        return message

    def _slices(self, rows: Rows, budget: StepBudget) -> Column:
        """Tokens per row: spec 0.3, then the chunk limit, then the step's budgets in order. 0: skipped this step."""
        want = self.slots.wanted(rows, self._next_step, self.limits.stages)
        np.minimum(want, budget.chunk, out=want)
        if budget.decodes is not None or budget.prefill is not None:
            decodes = self.slots.decoding(rows)
            want[decodes] = _within(want[decodes], _limit(budget.decodes))
            want[~decodes] = _within(want[~decodes], _limit(budget.prefill))
        return _within(want, budget.tokens)

    def _choose_running(self, choice: _Choice, budget: StepBudget, view: SchedulerView) -> None:
        """Rows and blocks of running requests, in order, preempting from the end while blocks are short."""
        while True:
            rows = self.policy.order(view)
            counts = self._slices(rows, budget)
            missing = self.kv.missing(rows, self.slots.computed.take(rows) + counts)
            short = int(np.searchsorted(np.cumsum(missing), self.kv.pool.num_free, side="right"))
            if short == len(rows):
                break
            choice.admitting = False
            victim = int(self.running[-1])
            if self._fences or self.ledger.names(victim):
                # The next result frees blocks; preempting now would free none earlier (spec 0.7, fence).
                rows, counts, missing = rows[:short], counts[:short], missing[:short]
                break
            self.preempt(victim)
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
        chunk = counts > 1
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
            held = len(request.token_ids) if budget.runner_reports else hit + count
            if not count or not self.kv.can_admit(prefix, held):
                break
            self._admit(request, prefix, hit, count, choice)
            seats -= 1

    def _admit(self, request: Request, prefix: list[int], hit: int, count: int, choice: _Choice) -> None:
        self.waiting.remove(request)
        tokens = request.token_ids
        slot = self.slots.assign(request, self.limits.max_model_len)
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = min(hit, request.num_prompt_tokens)
        request.become(RequestStatus.RUNNING)
        request.token_ids = _NO_TOKENS
        self.kv.adopt(slot, prefix)
        row = np.array([slot], np.int64)
        end = np.array([hit + count], np.int32)
        if choice.runner_reports:
            self.kv.grow(row, self.kv.missing(row, np.array([len(tokens)], np.int32)))
        else:
            self.kv.grow(row, self.kv.missing(row, end))
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
            self.preempt(worst)

    def _dispatch(self, choice: _Choice) -> tuple[InflightStep, SchedulerOutput]:
        """Takes the step id, snapshots the plan, and only then advances the columns (spec 0.5 D)."""
        s = self.slots
        slots, counts = _joined(choice.slots), _joined(choice.counts)
        starts = s.computed.take(slots)
        samples = starts + counts >= s.tokens.take(slots) + s.placeholders.take(slots)
        step = InflightStep(self._next_step, slots, s.generation.take(slots), starts, counts, samples)
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
        )
        self._released.clear()
        self._next_step += 1
        self.ledger.add(step)
        return step, plan

    def grammar_output(self, step: InflightStep, vocab_size: int) -> GrammarOutput | None:
        """What the constrained rows of the step dispatched last may sample; None while one of them has a token of an
        earlier step in flight, for its grammar stands before that token. A row whose result will be ignored is free."""
        s = self.slots
        rows = step.samples & s.constrained.take(step.slots)
        slots = step.slots[rows]
        counts = self.ledger.current(step)[rows] & np.isin(s.state.take(slots), (LIVE, DELIVER))
        if (counts & (s.placeholders.take(slots) > 1)).any():
            return None
        masks = np.empty((len(slots), -(-vocab_size // 32)), np.int32)
        masks[~counts] = -1
        for slot, mask, counts_for in zip(slots.tolist(), masks, counts.tolist(), strict=True):
            if counts_for:
                self._grammar(s.request(slot)).fill(mask)
        return GrammarOutput(
            self.epoch, step.step_id, pack(slots.astype(np.int32)), masks.view(np.uint8).reshape(-1).data
        )

    @staticmethod
    def _grammar(request: Request) -> Grammar:
        if request.grammar is None:
            raise KeyError(f"request {request.client}/{request.number} has no grammar")
        return request.grammar

    # -- results -------------------------------------------------------------------------------------------------

    def report_progress(self, step: InflightStep, slots: Column, frontiers: Column) -> None:
        """How far prefill rows of the oldest step came, int32[reports] each; before that step's `update_from_output`.

        Where that is not what was scheduled, everything in flight for the slot is void (spec 5(b) 15).

        Raises: UnknownResult, if a row is none of the step's prefills, or no chunk of it can end there.
        """
        s, current = self.slots, self.ledger.current(step)
        row_of = {slot: row for row, slot in enumerate(step.slots.tolist())}
        for slot, frontier in zip(slots.tolist(), frontiers.tolist(), strict=True):
            row = row_of.get(slot, -1)
            if row < 0 or step.starts[row] >= s.entry[slot]:
                raise UnknownResult(
                    f"step {step.step_id} reports progress of slot {slot}, which is none of its prefills"
                )
            start, end = int(step.starts[row]), int(step.starts[row] + step.counts[row])
            # The last token is always computed with a row that samples, because its logits are needed.
            most = end if step.samples[row] else int(min(s.entry[slot] - 1, s.capacity[slot]))
            if not start < frontier <= most:
                raise UnknownResult(
                    f"step {step.step_id} reports {frontier} tokens of slot {slot}: only {start + 1} to {most} can be"
                )
            if frontier != end and current[row] and s.state[slot] == LIVE:
                self.ledger.roll_back(slot, frontier)
                self.counters["rollbacks"] += 1

    def update_from_output(
        self,
        step: InflightStep,
        token_ids: Column,
        logprobs: LogprobRows | None = None,
        embeddings: Mapping[int, bytes] = NO_EMBEDDINGS,
    ) -> None:
        """Applies the result of the oldest step (spec 0.6).

        Args:
            token_ids: int32[rows with samples], in plan order; NO_TOKEN where the runner voided the row
            logprobs: `owners` are slots of the step
            embeddings: slot -> float32[hidden size], of pooling rows with samples

        Raises: UnknownResult, if the step is not the oldest in flight or a row is missing; nothing has changed then.
        """
        every = step.samples.all()
        rows = step.slots if every else step.slots[step.samples]
        if step.step_id != self.ledger.oldest or len(token_ids) != len(rows):
            raise UnknownResult(
                f"result of step {step.step_id} with {len(token_ids)} rows, expected step {self.ledger.oldest} "
                f"with {len(rows)} rows"
            )
        s, current = self.slots, self.ledger.current(step)
        state, current = s.state.take(rows), current if every else current[step.samples]
        live = current & (state == LIVE)
        if len(rows) and token_ids.min() < 0 and (live & (token_ids < 0)).any():
            slot = rows[live & (token_ids < 0)][0]
            raise UnknownResult(f"step {step.step_id} has no token for slot {slot} and no reason for it")
        self.ledger.remove_oldest()
        if logprobs is not None:
            self._publish_logprobs(logprobs)
        if not live.all():
            delivered = current & (state == DELIVER)
            self._deliver_stale(rows[delivered], token_ids[delivered], embeddings)
            rows, token_ids = rows[live], token_ids[live]
        special = s.constrained.take(rows) | s.pooling.take(rows)
        if special.any():
            goes_on = self._advance_special(rows, token_ids, special, embeddings)
            rows, token_ids = rows[goes_on], token_ids[goes_on]
        self._append(rows, token_ids)
        self.kv.commit(rows if len(rows) == len(step.slots) else step.slots[s.state[step.slots] == LIVE])
        self._stop(rows, token_ids)
        for slot in self._fences.pop(step.step_id, ()):
            self._free(slot)

    def _publish_logprobs(self, logprobs: LogprobRows) -> None:
        """Those of requests that want them still. A slot that the step names has not changed its owner since (fence),
        and of a row that a rollback voided there are none."""
        s, owners = self.slots, logprobs.owners
        wanted = np.isin(s.state.take(owners), (LIVE, DELIVER))
        logprobs = logprobs.where(wanted)
        owners = logprobs.owners
        numbers = s.number.take(owners).view(np.int32)
        self.outputs.logprobs(s.client.take(owners), logprobs._replace(owners=numbers))

    def _advance_special(
        self, rows: Rows, token_ids: Column, special: NDArray[np.bool_], embeddings: Mapping[int, bytes]
    ) -> NDArray[np.bool_]:
        """Grammars take their token, embeddings are delivered. bool[rows]: whose token is to be appended."""
        goes_on = np.ones(len(rows), np.bool_)
        some = np.flatnonzero(special)
        for row, slot, token in zip(*(c.tolist() for c in (some, rows[some], token_ids[some])), strict=True):
            request = self.slots.request(slot)
            if request.pooling is not Pooling.NONE:
                self._embed(request, embeddings.get(slot))
            goes_on[row] = not request.finished and self._matches(request, token)
        return goes_on

    def _embed(self, request: Request, values: bytes | None) -> None:
        if values is None:
            message = "the workers returned no embedding"
            self.finish(request, request.finish_message(FinishReason.ERROR, message=message))
            return
        self.outputs.embedding(request.client, Embedding(request.number, values))
        self.finish(request, request.finish_message(FinishReason.STOP))

    def _matches(self, request: Request, token: int) -> bool:
        """Whether a token may be appended; otherwise its request has ended."""
        if request.grammar is None or request.grammar.accept(token):
            return True
        message = "the output could not be kept within what was asked for; simplify the grammar or schema"
        self.finish(request, request.finish_message(FinishReason.ERROR, message=message))
        return False

    def _append(self, rows: Rows, token_ids: Column) -> None:
        s = self.slots
        totals = s.tokens.take(rows)
        s.history[rows, totals] = token_ids
        s.tokens[rows] = totals + 1
        self.outputs.tokens(s.client.take(rows), s.number.take(rows), totals - s.prompt.take(rows), token_ids)
        self.counters["generation_tokens"] += len(rows)

    def _stop(self, rows: Rows, token_ids: Column) -> None:
        """Ends the requests whose new token is a stop token or their last one."""
        s = self.slots
        totals = s.tokens.take(rows)
        matches = s.stop_ids.take(rows, axis=0) == token_ids[:, None]
        stops = matches[:, 0] if matches.shape[1] == 1 else matches.any(axis=1)
        stops &= totals >= s.stops_from.take(rows)
        for row in np.flatnonzero(stops | (totals >= s.limit.take(rows))).tolist():
            self._complete(s.request(int(rows[row])), int(token_ids[row]), bool(stops[row]))

    def _deliver_stale(self, rows: Rows, token_ids: Column, embeddings: Mapping[int, bytes]) -> None:
        """Tokens that were in flight when their request was preempted: appended while it waits (spec 0.7)."""
        for slot, token in zip(rows.tolist(), token_ids.tolist(), strict=True):
            request = self.slots.request(slot)
            request.stale_rows -= 1
            if token == NO_TOKEN:
                continue
            if request.pooling is not Pooling.NONE:
                self._embed(request, embeddings.get(slot))
            if request.finished or not self._matches(request, token):
                continue
            self.waiting.append_token(request, token)
            total, prompt, params = len(request.token_ids), request.num_prompt_tokens, request.params
            self.outputs.token(request, total - prompt - 1, token)
            self.counters["generation_tokens"] += 1
            stop = token in params.eos_token_ids + params.stop_token_ids and total >= request.stops_from
            if stop or total >= min(prompt + params.max_tokens, self.limits.max_model_len):
                self._complete(request, token, stop)

    def _complete(self, request: Request, token: int, stop: bool) -> None:
        reason = FinishReason.STOP if stop else FinishReason.LENGTH
        self.finish(request, request.finish_message(reason, token if stop else None))
