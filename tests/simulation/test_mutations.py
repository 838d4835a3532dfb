"""The simulator notices faults: each fault below replaces a method of a part of the core, and must be caught."""

import dataclasses
from copy import copy
from typing import Any

import msgspec
import numpy as np
import pytest

from protocol.requests import FinishReason
from protocol.sampling import Pooling
from services.scheduler.core.apply import ResultApplier
from services.scheduler.core.batch_queue import BatchQueue
from services.scheduler.core.block_pool import BlockPool
from services.scheduler.core.compiling import CompilingRequests
from services.scheduler.core.deferred_masks import DeferredMasks
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.epoch import EpochState
from services.scheduler.core.kv_cache import KVCacheManager
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.pins import Pins
from services.scheduler.core.plan import StepPlanner
from services.scheduler.core.request import Request
from services.scheduler.core.slots import DELIVER, DROP, SlotColumns
from services.scheduler.core.waiting import WaitingQueue
from services.worker.kv_memory import BlockNames
from tests.simulation.faults import Fault, assert_caught, parameters


def no_fence(names: Any) -> Any:
    return lambda ledger, slot: False


def released_when_the_oldest_step_returns(names: Any) -> Any:
    def leave(self: EpochState, slot: int, state: int) -> None:
        self.running = self.running[self.running != slot]
        self.slots.retire(slot, state)
        if self.ledger.names(slot):
            self.fences.setdefault(self.ledger.oldest, []).append(slot)
        else:
            self.free(slot)

    return leave


def stale_tokens_lost(deliver: Any) -> Any:
    def broken(self: ResultApplier, retired: Any) -> None:
        for slot in retired.tolist():
            self.epoch.slots.request(slot).stale_rows -= 1

    return broken


def no_resume_gate(preempt: Any) -> Any:
    def broken(self: Lifecycle, slot: int, *args: Any, **named: Any) -> None:
        request = self.epoch.slots.request(slot)
        preempt(self, slot, *args, **named)
        request.stale_rows = 0

    return broken


def stale_rows_survive_an_abort(drop: Any) -> Any:
    def broken(self: Lifecycle, request: Any) -> None:
        request.stale_rows = 0

    return broken


def dropped_rows_are_delivered(preempt: Any) -> Any:
    def broken(self: Lifecycle, slot: int, cause: Any, stale: int = DELIVER) -> None:
        preempt(self, slot, cause, stale)
        if self.epoch.slots.state[slot] == DROP:
            self.epoch.slots.state[slot] = DELIVER

    return broken


def next_block_is_registered_too(register: Any) -> Any:
    def broken(self: KVCacheManager, rows: Any, frontiers: Any) -> None:
        register(self, rows, np.minimum(frontiers + self.block_size, self._slots.capacity[rows]))

    return broken


def registered_when_looked_up(find: Any) -> Any:
    """A block is registered before the choice is final, so the cache refers to a block that no step writes."""

    def broken(self: KVCacheManager, request: Any) -> Any:
        blocks = find(self, request)
        if self.pool.blank and len(request.block_hashes) > len(blocks):
            spare = self.pool.blank[-1]
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


def every_adapter_has_a_seat(has_seat: Any) -> Any:
    return lambda planner, request: True


def one_adapter_holds_back_another(has_seat: Any) -> Any:
    """Work conservation: a free seat is not given away."""

    def broken(self: StepPlanner, request: Request) -> bool:
        running = (self.epoch.slots.request(slot).lora for slot in self.epoch.running.tolist())
        return request.lora is None or not {*running} - {None, request.lora}

    return broken


def salt_without_the_adapter(init: Any) -> Any:
    def broken(self: Request, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        if self.lora is not None:
            self.cache_salt = self.cache_salt.removeprefix(f"\0{self.lora.digest}:")

    return broken


def whole_prompt_is_a_hit(find: Any) -> Any:
    def broken(self: KVCacheManager, request: Any) -> Any:
        blocks = find(self, request)
        tokens = request.token_ids
        if tokens.size % self.block_size == 0 and self.enable_prefix_caching:
            self.extend_hashes(request, tokens, tokens.size // self.block_size)
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
    def broken(self: StepPlanner, rows: Any, budget: Any) -> Any:
        self.epoch.slots.limit += 1
        try:
            return slices(self, rows, budget)
        finally:
            self.epoch.slots.limit -= 1

    return broken


def certain_finish_one_early(slices: Any) -> Any:
    def broken(self: StepPlanner, rows: Any, budget: Any) -> Any:
        self.epoch.slots.limit -= 1
        try:
            return slices(self, rows, budget)
        finally:
            self.epoch.slots.limit += 1

    return broken


def results_matched_by_arrival(deliver: Any) -> Any:
    def broken(self: BatchQueue, result: Any) -> bool:
        waiting = [step for step in self.steps if step.step_id not in self.results]
        if waiting:
            self.results[waiting[0].step_id] = result
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
    def broken(self: SlotColumns, slot: int, ids: Any) -> None:
        if ids:
            set_ids(self, slot, ids)

    return broken


def min_tokens_ignored(assign: Any) -> Any:
    def broken(self: SlotColumns, request: Any, max_model_len: int) -> int:
        slot = int(assign(self, request, max_model_len))
        self.stops_from[slot] = 0
        return slot

    return broken


def a_preempted_request_loses_its_last_token(add: Any) -> Any:
    def broken(self: WaitingQueue, request: Any) -> None:
        if request.num_preemptions and len(request.token_ids) > request.num_prompt_tokens:
            request.token_ids = request.token_ids[:-1]
        add(self, request)

    return broken


def workers_are_not_notified_of_released_slots(free: Any) -> Any:
    def broken(self: EpochState, slot: int) -> None:
        free(self, slot)
        self.released.clear()

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


def finished_twice(finish: Any) -> Any:
    def broken(self: Lifecycle, request: Request, message: Any) -> None:
        finish(self, request, message)
        if message is not None and message.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.store.outputs.finish(request.frontend, request.finish_message(FinishReason.LENGTH))

    return broken


def a_void_leaves_a_fence(void: Any) -> Any:
    def broken(self: EpochState) -> None:
        kept = dict(list(self.fences.items())[:1])
        for step_id in kept:
            del self.fences[step_id]
        void(self)
        self.fences.update(kept)

    return broken


def a_void_keeps_a_cached_block(void: Any) -> Any:
    def broken(self: EpochState) -> None:
        pool = self.kv.pool
        kept = list(pool.by_hash.items())[:1]
        void(self)
        for block_hash, block in kept:
            pool.take(pool.num_free)
            pool.register(block, block_hash)
            pool.give_back(range(pool.num_blocks))

    return broken


def a_void_leaves_requests_gated(void: Any) -> Any:
    def broken(self: Lifecycle) -> None:
        gates = {request: request.stale_rows for request in self.store.waiting}
        void(self)
        for request, stale_rows in gates.items():
            request.stale_rows = stale_rows

    return broken


def a_void_counts_promised_tokens_as_known(void: Any) -> Any:
    def broken(self: Lifecycle) -> None:
        for slot in self.epoch.running.tolist():
            if self.epoch.slots.placeholders[slot]:
                self.epoch.slots.tokens[slot] -= 1
        void(self)

    return broken


def a_void_leaves_a_release_notice(void: Any) -> Any:
    def broken(self: EpochState) -> None:
        void(self)
        self.released.append(0)

    return broken


def an_epoch_without_its_number(start: Any) -> Any:
    return lambda self, limits, policy, number: start(self, limits, policy, self.epoch.number)


def results_of_any_epoch_are_applied(on_result: Any) -> Any:
    def broken(self: EngineCore, result: Any) -> None:
        on_result(self, msgspec.structs.replace(result, epoch=self.epoch.number))

    return broken


def the_queue_outlives_its_epoch(clear: Any) -> Any:
    return lambda self: None


def requests_that_do_not_fit_stay(finish: Any) -> Any:
    def broken(self: Lifecycle, request: Request, message: Any) -> None:
        if message is None or "in which it does not fit" not in message.message:
            finish(self, request, message)

    return broken


def a_new_epoch_loses_a_request(start: Any) -> Any:
    def broken(self: EngineCore, limits: Any, policy: Any, number: int) -> None:
        for request in list(self.store.waiting)[-1:]:
            self.store.waiting.remove(request)
        start(self, limits, policy, number)

    return broken


def stage_spacing_one_step_short(wanted: Any) -> Any:
    return lambda self, rows, next_step, stages: wanted(self, rows, next_step, max(1, stages - 1))


def stage_spacing_one_step_long(wanted: Any) -> Any:
    def broken(self: SlotColumns, rows: Any, next_step: int, stages: int) -> Any:
        return wanted(self, rows, next_step, stages + (stages > 1))

    return broken


def stage_spacing_of_confirmed_tokens(wanted: Any) -> Any:
    def broken(self: SlotColumns, rows: Any, next_step: int, stages: int) -> Any:
        want = wanted(self, rows, next_step, stages)
        if stages > 1:
            want[(self.sampled_step[rows] > 0) & (next_step - self.sampled_step[rows] < stages)] = 0
        return want

    return broken


def stage_spacing_of_the_last_owner(assign: Any) -> Any:
    def broken(self: SlotColumns, request: Any, max_model_len: int) -> int:
        before = int(self.sampled_step[self.free[0]])
        slot = int(assign(self, request, max_model_len))
        self.sampled_step[slot] = before
        self.placeholders[slot] = before > 0
        return slot

    return broken


def admission_beyond_the_prefill_budget(admit: Any) -> Any:
    def broken(self: StepPlanner, choice: Any, budget: Any) -> None:
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
    return lambda self, step, sampled_before: output(self, step, np.zeros_like(sampled_before))


def masks_of_other_rows(output: Any) -> Any:
    def broken(self: DeferredMasks, *arguments: Any) -> Any:
        grammar = output(self, *arguments)
        if grammar is None or len(grammar.slots) < 8:
            return grammar
        masks = np.frombuffer(grammar.bitmask, np.int32).reshape(len(grammar.slots) // 4, -1)
        return msgspec.structs.replace(grammar, bitmask=masks[::-1].tobytes())

    return broken


def a_grammar_ignores_replayed_tokens(on_grammar: Any) -> Any:
    def broken(self: EngineCore, ticket: int, grammar: Any) -> None:
        fresh = copy(grammar)
        on_grammar(self, ticket, grammar)
        for request in self.store.waiting:
            if request.grammar is grammar:
                request.grammar = fresh

    return broken


def a_failed_grammar_is_overlooked(matches: Any) -> Any:
    def broken(self: Request, token_ids: list[int]) -> int:
        matches(self, token_ids)
        return len(token_ids)

    return broken


def a_ticket_outlives_its_aborted_request(cancel: Any) -> Any:
    """The ticket of the grammar stays when its request ends."""

    def broken(self: CompilingRequests, request: Request) -> bool:
        before = dict(self._by_ticket)
        cancelled = bool(cancel(self, request))
        self._by_ticket = before
        return cancelled

    return broken


def a_deferred_sampling_outlives_its_epoch(clear: Any) -> Any:
    def broken(self: BatchQueue) -> None:
        held = self.unmasked.copy()
        clear(self)
        self.unmasked = held

    return broken


def logprobs_of_requests_that_left(wanted: Any) -> Any:
    def broken(self: ResultApplier, logprobs: Any) -> Any:
        return logprobs

    return broken


def every_request_reads_the_prefix_cache(find: Any) -> Any:
    def broken(self: KVCacheManager, request: Request) -> Any:
        params, pooling = request.params, request.pooling
        request.params = msgspec.structs.replace(params, prompt_logprobs=None)
        request.pooling = Pooling.NONE
        try:
            return find(self, request)
        finally:
            request.params, request.pooling = params, pooling

    return broken


def whole_when_dispatched(register: Any) -> Any:
    def broken(self: KVCacheManager, rows: Any, frontiers: Any) -> None:
        register(self, rows, frontiers)
        self.note_whole(rows, frontiers)

    return broken


def whole_one_step_too_early(note: Any) -> Any:
    """Positions of the steps in flight count as written."""

    def broken(self: KVCacheManager, rows: Any, confirmed: Any) -> None:
        note(self, rows, np.minimum(self._slots.computed[rows], self._slots.tokens[rows]))

    return broken


FAULTS = [
    Fault("kv", "note_whole", whole_one_step_too_early),
    Fault("kv", "register", whole_when_dispatched),
    Fault("deferred_masks", "grammar_output", masks_before_the_token_before_is_known),
    Fault("deferred_masks", "grammar_output", masks_of_other_rows),
    Fault("request", "matching", a_failed_grammar_is_overlooked),
    Fault("applier", "wanted_logprobs", logprobs_of_requests_that_left),
    Fault("kv", "find_prefix", every_request_reads_the_prefix_cache),
    Fault("engine", "on_grammar", a_grammar_ignores_replayed_tokens),
    Fault("compiling", "cancel", a_ticket_outlives_its_aborted_request),
    Fault("queue", "clear", a_deferred_sampling_outlives_its_epoch),
    Fault("epoch", "void", a_void_leaves_a_fence),
    Fault("epoch", "void", a_void_keeps_a_cached_block),
    Fault("lifecycle", "void", a_void_leaves_requests_gated),
    Fault("lifecycle", "void", a_void_counts_promised_tokens_as_known),
    Fault("epoch", "void", a_void_leaves_a_release_notice),
    Fault("engine", "start_epoch", an_epoch_without_its_number),
    Fault("engine", "on_result", results_of_any_epoch_are_applied),
    Fault("queue", "clear", the_queue_outlives_its_epoch),
    Fault("lifecycle", "finish", requests_that_do_not_fit_stay),
    Fault("engine", "start_epoch", a_new_epoch_loses_a_request),
    Fault("slots", "wanted", stage_spacing_one_step_short),
    Fault("slots", "wanted", stage_spacing_one_step_long),
    Fault("slots", "wanted", stage_spacing_of_confirmed_tokens),
    Fault("slots", "assign", stage_spacing_of_the_last_owner),
    Fault("planner", "admit_waiting", admission_beyond_the_prefill_budget),
    Fault("planner", "slices", slices_beyond_the_budget_of_decodes),
    Fault("planner", "slices", slices_beyond_the_chunk),
    Fault("planner", "admit_waiting", more_admissions_than_allowed),
    Fault("epoch", "free", workers_are_not_notified_of_released_slots),
    Fault("lifecycle", "finish", finished_twice),
    Fault("ledger", "add", every_chunk_samples),
    Fault("kv", "missing", one_block_too_few),
    Fault("ledger", "names", no_fence),
    Fault("epoch", "leave", released_when_the_oldest_step_returns),
    Fault("applier", "deliver_stale", stale_tokens_lost),
    Fault("lifecycle", "preempt", no_resume_gate),
    Fault("lifecycle", "preempt", dropped_rows_are_delivered),
    Fault("lifecycle", "drop_stale", stale_rows_survive_an_abort),
    Fault("kv", "register", next_block_is_registered_too),
    Fault("kv", "find_prefix", registered_when_looked_up),
    Fault("kv", "find_prefix", whole_prompt_is_a_hit),
    Fault("kv", "extend_hashes", hashes_without_salt),
    Fault("planner", "has_adapter_seat", every_adapter_has_a_seat),
    Fault("planner", "has_adapter_seat", one_adapter_holds_back_another),
    Fault("request", "__init__", salt_without_the_adapter),
    Fault("ledger", "add", no_placeholders),
    Fault("planner", "slices", one_step_too_many),
    Fault("planner", "slices", certain_finish_one_early),
    Fault("queue", "deliver", results_matched_by_arrival),
    Fault("pool", "forget", evicted_blocks_keep_their_hash),
    Fault("pool", "hold", hit_on_a_free_block_leaves_it_free),
    Fault("slots", "set_stop_ids", stop_ids_leak_to_the_next_owner),
    Fault("slots", "assign", min_tokens_ignored),
    Fault("waiting", "add", a_preempted_request_loses_its_last_token),
]


def found_before_it_is_loaded(load: Any) -> Any:
    """The blocks of a load count when it is sent."""

    def broken(self: StepPlanner, request: Any, prefix: Any) -> bool:
        waits = bool(load(self, request, prefix))
        for sent in self.store.loading.unsent:
            for block, name in zip(sent.blocks, sent.names, strict=True):
                self.epoch.kv.pool.register(block, name)
        return waits

    return broken


def a_load_fills_all_it_asked_for(on_loaded: Any) -> Any:
    def broken(self: EngineCore, epoch: int, ticket: int, count: int) -> None:
        load = self.store.loading.get(ticket)
        on_loaded(self, epoch, ticket, len(load.blocks) if load is not None else count)

    return broken


def blocks_before_a_load_may_be_evicted(reserve: Any) -> Any:
    def broken(self: KVCacheManager, prefix: Any, count: int) -> Any:
        blocks = reserve(self, prefix, count)
        self.pool.give_back(reversed(prefix))
        return blocks

    return broken


def a_load_outlives_its_aborted_request(finish: Any) -> Any:
    def broken(self: Lifecycle, request: Request, message: Any) -> None:
        load = self.store.loading.of(request)
        finish(self, request, message)
        if load is not None and self.store.loading.get(load.ticket) is None:
            load.requests.append(request)
            self.store.waiting.add(request)

    return broken


def pins_hold_no_blocks(hold: Any) -> Any:
    def broken(self: Pins, kv: Any) -> None:
        before = [pin.blocks for pin in self]
        hold(self, kv)
        for pin, held in zip(self, before, strict=True):
            kv.pool.give_back(block for block in pin.blocks if block not in held)

    return broken


def pins_may_take_all_blocks(add: Any) -> Any:
    def broken(self: Pins, pin: Any, kv: Any, limits: Any) -> None:
        add(self, pin, kv, dataclasses.replace(limits, max_model_len=1))

    return broken


def a_load_outlives_a_drop(drop: Any) -> Any:
    return lambda self, names: self.epoch.kv.drop(names)


def the_last_dropped_block_stays(drop: Any) -> Any:
    return lambda self, names: drop(self, names[:-1])


TIER_FAULTS = [
    Fault("pins", "hold", pins_hold_no_blocks),
    Fault("pins", "add", pins_may_take_all_blocks),
    Fault("lifecycle", "drop_blocks", a_load_outlives_a_drop),
    Fault("kv", "drop", the_last_dropped_block_stays),
    Fault("planner", "load", found_before_it_is_loaded),
    Fault("engine", "on_loaded", a_load_fills_all_it_asked_for),
    Fault("kv", "reserve", blocks_before_a_load_may_be_evicted),
    Fault("lifecycle", "finish", a_load_outlives_its_aborted_request),
]


@pytest.mark.parametrize("fault", TIER_FAULTS, ids=lambda fault: fault.name)
def test_fault_of_loads_is_caught(fault: Fault) -> None:
    assert_caught(fault, tier=True)


def _fill_blindly(names: BlockNames, block: int, ticket: int, write: Any) -> bool:
    write()
    return True


def test_a_worker_that_fills_blocks_that_were_given_away_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockNames, "fill", _fill_blindly)
    assert_caught(Fault("kv", "take_whole", lambda take: take), tier=True)


def test_a_worker_that_keeps_dropped_names_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockNames, "forget", lambda names, dropped: None)
    assert_caught(Fault("kv", "take_whole", lambda take: take), tier=True)


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_fault_is_caught(fault: Fault) -> None:
    assert_caught(fault)


def test_a_worker_that_keeps_the_names_of_rewritten_blocks_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockNames, "drop", lambda names, blocks: None)
    assert_caught(Fault("kv", "take_whole", lambda take: take))
