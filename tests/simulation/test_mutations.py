"""The simulator can fail: each fault below is put into the production classes on purpose and must be caught."""

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from protocol.requests import FinishReason
from services.scheduler.core import engine, results
from services.scheduler.core.batch_queue import BatchQueue
from services.scheduler.core.block_pool import BlockPool
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.kv_cache import KVCacheManager
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.slots import DELIVER, DROP, LIVE, SlotTable
from services.scheduler.core.waiting import WaitingQueue
from tests.simulation.driver import play
from tests.simulation.workload import draw

SEEDS = 150
"""Within so many seeds, running ahead by one step and by more, each fault must show."""

Fault = tuple[type, str, Callable[[Any], Any]]


def no_fence(names: Any) -> Any:
    return lambda ledger, slot: False


def released_when_the_oldest_step_returns(names: Any) -> Any:
    def leave(self: Scheduler, slot: int, state: int) -> None:
        self.running = self.running[self.running != slot]
        self.slots.retire(slot, state)
        if self.ledger.names(slot):
            self._fences.setdefault(self.ledger.oldest, []).append(slot)
        else:
            self._free(slot)

    return leave


def stale_tokens_lost(deliver: Any) -> Any:
    return lambda self, *_: 0


def no_resume_gate(preempt: Any) -> Any:
    def broken(self: Scheduler, slot: int, *args: Any, **named: Any) -> None:
        request = self.slots.request(slot)
        preempt(self, slot, *args, **named)
        request.stale_rows = 0

    return broken


def stale_rows_survive_an_abort(drop: Any) -> Any:
    def broken(self: Scheduler, request: Any) -> None:
        request.stale_rows = 0

    return broken


def dropped_rows_are_delivered(preempt: Any) -> Any:
    def broken(self: Scheduler, slot: int, cause: Any, stale: int = DELIVER) -> None:
        preempt(self, slot, cause, stale)
        if self.slots.state[slot] == DROP:
            self.slots.state[slot] = DELIVER

    return broken


def next_block_is_registered_too(register: Any) -> Any:
    def broken(self: KVCacheManager, rows: Any, frontiers: Any) -> None:
        register(self, rows, np.minimum(frontiers + self.block_size, self._slots.capacity[rows]))

    return broken


def registered_when_looked_up(find: Any) -> Any:
    """Eager registration before the choice is final: the zombie hit."""

    def broken(self: KVCacheManager, request: Any) -> Any:
        blocks = find(self, request)
        if self.pool._blank and len(request.block_hashes) > len(blocks):
            spare = self.pool._blank[-1]
            if self.pool.hash_of[spare] is None:
                self.pool.take(1)
                self.pool.register(spare, request.block_hashes[len(blocks)])
                self.pool.give_back([spare])
        return blocks

    return broken


def hashes_without_salt(extend: Any) -> Any:
    def broken(self: KVCacheManager, request: Any, tokens: Any, num_blocks: int) -> None:
        salt, request.cache_salt = request.cache_salt, ""
        extend(self, request, tokens, num_blocks)
        request.cache_salt = salt

    return broken


def whole_prompt_is_a_hit(find: Any) -> Any:
    def broken(self: KVCacheManager, request: Any) -> Any:
        blocks = find(self, request)
        tokens = request.token_ids
        if tokens.size % self.block_size == 0 and self.enable_prefix_caching:
            self._extend_hashes(request, tokens, tokens.size // self.block_size)
            block = self.pool.by_hash.get(request.block_hashes[tokens.size // self.block_size - 1])
            if block is not None and len(blocks) == tokens.size // self.block_size - 1:
                blocks.append(block)
        return blocks

    return broken


def no_placeholders(add: Any) -> Any:
    def broken(self: Ledger, step: Any) -> None:
        add(self, step)
        self._slots.placeholders[step.slots] -= step.samples

    return broken


def one_step_too_many(slices: Any) -> Any:
    def broken(self: Scheduler, rows: Any, budget: Any) -> Any:
        self.slots.limit += 1
        try:
            return slices(self, rows, budget)
        finally:
            self.slots.limit -= 1

    return broken


def certain_finish_one_early(slices: Any) -> Any:
    def broken(self: Scheduler, rows: Any, budget: Any) -> Any:
        self.slots.limit -= 1
        try:
            return slices(self, rows, budget)
        finally:
            self.slots.limit += 1

    return broken


def results_matched_by_arrival(deliver: Any) -> Any:
    def broken(self: BatchQueue, result: Any) -> bool:
        waiting = [step for step in self._steps if step.step_id not in self._results]
        if waiting:
            self._results[waiting[0].step_id] = result
        return bool(waiting)

    return broken


def evicted_blocks_keep_their_hash(forget: Any) -> Any:
    return lambda self, block: None


def hit_on_a_free_block_leaves_it_free(hold: Any) -> Any:
    def broken(self: BlockPool, blocks: Any) -> None:
        for block in blocks:
            self.refs[block] += 1

    return broken


def stop_ids_leak_to_the_next_owner(set_ids: Any) -> Any:
    def broken(self: SlotTable, slot: int, ids: Any) -> None:
        if ids:
            set_ids(self, slot, ids)

    return broken


def min_tokens_ignored(assign: Any) -> Any:
    def broken(self: SlotTable, request: Any, max_model_len: int) -> int:
        slot = int(assign(self, request, max_model_len))
        self.stops_from[slot] = 0
        return slot

    return broken


def a_preempted_request_forgets_its_last_token(add: Any) -> Any:
    def broken(self: WaitingQueue, request: Any) -> None:
        if request.num_preemptions and len(request.token_ids) > request.num_prompt_tokens:
            request.token_ids = request.token_ids[:-1]
        add(self, request)

    return broken


def released_slots_are_not_told(free: Any) -> Any:
    def broken(self: Scheduler, slot: int) -> None:
        free(self, slot)
        self._released.clear()

    return broken


def every_chunk_samples(add: Any) -> Any:
    def broken(self: Ledger, step: Any) -> None:
        step.samples[:] = True
        add(self, step)

    return broken


def one_block_too_few(missing: Any) -> Any:
    def broken(self: KVCacheManager, slots: Any, num_tokens: Any) -> Any:
        return missing(self, slots, num_tokens - 1)

    return broken


def finished_twice(complete: Any) -> Any:
    def broken(self: Scheduler, request: Any, token: int, stop: bool) -> None:
        complete(self, request, token, stop)
        self.outputs.finish(request.client, request.finish_message(FinishReason.LENGTH))

    return broken


def a_void_forgets_a_fence(void: Any) -> Any:
    def broken(self: Scheduler) -> None:
        kept = dict(list(self._fences.items())[:1])
        for step_id in kept:
            del self._fences[step_id]
        void(self)
        self._fences.update(kept)

    return broken


def a_void_keeps_a_cached_block(void: Any) -> Any:
    def broken(self: Scheduler) -> None:
        kept = list(self.kv.pool.by_hash.items())[:1]
        void(self)
        for block_hash, block in kept:
            self.kv.pool.take(self.kv.pool.num_free)
            self.kv.pool.register(block, block_hash)
            self.kv.pool.give_back(range(self.kv.pool.num_blocks))

    return broken


def a_void_leaves_requests_gated(void: Any) -> Any:
    def broken(self: Scheduler) -> None:
        gates = {request: request.stale_rows for request in self.waiting}
        void(self)
        for request, stale_rows in gates.items():
            request.stale_rows = stale_rows

    return broken


def a_void_counts_promised_tokens_as_known(void: Any) -> Any:
    def broken(self: Scheduler) -> None:
        for slot in self.running.tolist():
            if self.slots.placeholders[slot]:
                self.slots.tokens[slot] -= 1
        void(self)

    return broken


def lost_workers_are_told_of_slots(void: Any) -> Any:
    def broken(self: Scheduler) -> None:
        void(self)
        self._released.append(0)

    return broken


def an_epoch_without_its_number(start: Any) -> Any:
    return lambda self, limits, policy, epoch: start(self, limits, policy, self.scheduler.epoch)


def results_of_any_epoch_are_applied(on_result: Any) -> Any:
    def broken(self: EngineCore, result: Any) -> None:
        on_result(self, msgspec.structs.replace(result, epoch=self.scheduler.epoch))

    return broken


def the_queue_outlives_its_epoch(end: Any) -> Any:
    def broken(self: EngineCore) -> None:
        self.scheduler.void()

    return broken


def what_does_not_fit_goes_on(start: Any) -> Any:
    def broken(self: EngineCore, limits: Any, policy: Any, epoch: int) -> None:
        self.scheduler = engine.Scheduler(limits, policy, epoch, before=self.scheduler)

    return broken


def a_new_epoch_forgets_a_request(init: Any) -> Any:
    def broken(self: Scheduler, limits: Any, policy: Any, epoch: int = 1, before: Any = None) -> None:
        if before is not None and before.waiting._members:
            before.waiting._members.popitem()
        init(self, limits, policy, epoch, before)

    return broken


def cadence_one_step_short(wanted: Any) -> Any:
    return lambda self, rows, next_step, stages: wanted(self, rows, next_step, max(1, stages - 1))


def cadence_one_step_long(wanted: Any) -> Any:
    def broken(self: SlotTable, rows: Any, next_step: int, stages: int) -> Any:
        return wanted(self, rows, next_step, stages + (stages > 1))

    return broken


def cadence_without_regard_to_what_is_known(wanted: Any) -> Any:
    def broken(self: SlotTable, rows: Any, next_step: int, stages: int) -> Any:
        want = wanted(self, rows, next_step, stages)
        if stages > 1:
            want[(self.sampled_step[rows] > 0) & (next_step - self.sampled_step[rows] < stages)] = 0
        return want

    return broken


def cadence_of_the_last_owner(assign: Any) -> Any:
    def broken(self: SlotTable, request: Any, max_model_len: int) -> int:
        before = int(self.sampled_step[self.free[0]])
        slot = int(assign(self, request, max_model_len))
        self.sampled_step[slot] = before
        self.placeholders[slot] = before > 0
        return slot

    return broken


def admission_beyond_the_prefill_budget(admit: Any) -> Any:
    def broken(self: Scheduler, choice: Any, budget: Any) -> None:
        choice.prefill_left = choice.tokens_left
        admit(self, choice, budget)

    return broken


def slices_beyond_the_budget_of_decodes(slices: Any) -> Any:
    return lambda self, rows, budget: slices(self, rows, dataclasses.replace(budget, decodes=None))


def slices_beyond_the_chunk(slices: Any) -> Any:
    return lambda self, rows, budget: slices(self, rows, dataclasses.replace(budget, chunk=budget.tokens))


def more_admissions_than_allowed(admit: Any) -> Any:
    return lambda self, choice, budget: admit(self, choice, dataclasses.replace(budget, admissions=None))


def masks_before_the_token_before_is_known(output: Any) -> Any:
    def broken(self: Scheduler, step: Any, vocab_size: int) -> Any:
        held, self.slots.sampling = self.slots.sampling, np.zeros_like(self.slots.sampling)
        try:
            return output(self, step, vocab_size)
        finally:
            self.slots.sampling = held

    return broken


def masks_of_other_rows(output: Any) -> Any:
    def broken(self: Scheduler, step: Any, vocab_size: int) -> Any:
        grammar = output(self, step, vocab_size)
        if grammar is None or len(grammar.slots) < 8:
            return grammar
        masks = np.frombuffer(grammar.bitmask, np.int32).reshape(len(grammar.slots) // 4, -1)
        return msgspec.structs.replace(grammar, bitmask=masks[::-1].tobytes())

    return broken


def a_grammar_forgets_what_was_delivered_before(on_grammar: Any) -> Any:
    def broken(self: EngineCore, ticket: int, grammar: Any) -> None:
        request = self._compiling.get(ticket)
        if request is None or isinstance(grammar, str):
            on_grammar(self, ticket, grammar)
            return
        request.num_prompt_tokens, kept = len(request.token_ids), request.num_prompt_tokens
        on_grammar(self, ticket, grammar)
        request.num_prompt_tokens = kept

    return broken


def a_failed_grammar_is_overlooked(matches: Any) -> Any:
    def broken(self: Request, token_ids: list[int]) -> int:
        matches(self, token_ids)
        return len(token_ids)

    return broken


def aborted_while_compiled(finish: Any) -> Any:
    """The ticket outlives its request."""

    def broken(self: EngineCore, request: Any, reason: Any) -> None:
        before = dict(self._compiling)
        finish(self, request, reason)
        self._compiling = before

    return broken


def a_deferred_sampling_outlives_its_epoch(end: Any) -> Any:
    def broken(self: EngineCore) -> None:
        held = self._unsampled
        end(self)
        self._unsampled = held

    return broken


def logprobs_of_whoever_had_the_slot(wanted: Any) -> Any:
    def broken(logprobs: Any, state: Any) -> Any:
        return wanted(logprobs, np.full_like(state, LIVE))

    return broken


def everybody_reads_the_prefix_cache(find: Any) -> Any:
    def broken(self: KVCacheManager, request: Any) -> Any:
        reads = Request.reads_prefix_cache
        Request.reads_prefix_cache = True  # type: ignore[method-assign, assignment]
        try:
            return find(self, request)
        finally:
            Request.reads_prefix_cache = reads  # type: ignore[method-assign]

    return broken


FAULTS: list[Fault] = [
    (Scheduler, "grammar_output", masks_before_the_token_before_is_known),
    (Scheduler, "grammar_output", masks_of_other_rows),
    (Request, "matching", a_failed_grammar_is_overlooked),
    (results, "_wanted", logprobs_of_whoever_had_the_slot),
    (KVCacheManager, "find_prefix", everybody_reads_the_prefix_cache),
    (EngineCore, "on_grammar", a_grammar_forgets_what_was_delivered_before),
    (EngineCore, "_finish", aborted_while_compiled),
    (EngineCore, "end_epoch", a_deferred_sampling_outlives_its_epoch),
    (Scheduler, "void", a_void_forgets_a_fence),
    (Scheduler, "void", a_void_keeps_a_cached_block),
    (Scheduler, "void", a_void_leaves_requests_gated),
    (Scheduler, "void", a_void_counts_promised_tokens_as_known),
    (Scheduler, "void", lost_workers_are_told_of_slots),
    (EngineCore, "start_epoch", an_epoch_without_its_number),
    (EngineCore, "on_result", results_of_any_epoch_are_applied),
    (EngineCore, "end_epoch", the_queue_outlives_its_epoch),
    (EngineCore, "start_epoch", what_does_not_fit_goes_on),
    (Scheduler, "__init__", a_new_epoch_forgets_a_request),
    (SlotTable, "wanted", cadence_one_step_short),
    (SlotTable, "wanted", cadence_one_step_long),
    (SlotTable, "wanted", cadence_without_regard_to_what_is_known),
    (SlotTable, "assign", cadence_of_the_last_owner),
    (Scheduler, "_admit_waiting", admission_beyond_the_prefill_budget),
    (Scheduler, "_slices", slices_beyond_the_budget_of_decodes),
    (Scheduler, "_slices", slices_beyond_the_chunk),
    (Scheduler, "_admit_waiting", more_admissions_than_allowed),
    (Scheduler, "_free", released_slots_are_not_told),
    (Scheduler, "_complete", finished_twice),
    (Ledger, "add", every_chunk_samples),
    (KVCacheManager, "missing", one_block_too_few),
    (Ledger, "names", no_fence),
    (Scheduler, "_leave", released_when_the_oldest_step_returns),
    (Scheduler, "_deliver_stale", stale_tokens_lost),
    (Scheduler, "preempt", no_resume_gate),
    (Scheduler, "preempt", dropped_rows_are_delivered),
    (Scheduler, "_drop_stale", stale_rows_survive_an_abort),
    (KVCacheManager, "register", next_block_is_registered_too),
    (KVCacheManager, "find_prefix", registered_when_looked_up),
    (KVCacheManager, "find_prefix", whole_prompt_is_a_hit),
    (KVCacheManager, "_extend_hashes", hashes_without_salt),
    (Ledger, "add", no_placeholders),
    (Scheduler, "_slices", one_step_too_many),
    (Scheduler, "_slices", certain_finish_one_early),
    (BatchQueue, "deliver", results_matched_by_arrival),
    (BlockPool, "forget", evicted_blocks_keep_their_hash),
    (BlockPool, "hold", hit_on_a_free_block_leaves_it_free),
    (SlotTable, "_set_stop_ids", stop_ids_leak_to_the_next_owner),
    (SlotTable, "assign", min_tokens_ignored),
    (WaitingQueue, "add", a_preempted_request_forgets_its_last_token),
]


def assert_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch, speculates: bool = False) -> None:
    owner, name, broken = fault
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    for seed in range(SEEDS):
        for depth in draw(seed, speculates).depths[1:3]:
            try:
                play(seed, depth, speculates=speculates)
            except Exception:
                return
    pytest.fail(f"{SEEDS} seeds did not notice: {broken.__name__}")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[2].__name__)
def test_fault_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(fault, monkeypatch)
