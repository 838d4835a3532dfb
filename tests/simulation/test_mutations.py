"""The simulator notices faults: each fault below replaces a method of a part of the core, and must be caught."""

from collections import deque
from copy import copy
from dataclasses import replace
from itertools import starmap
from typing import Any

import msgspec
import numpy as np
import pytest

from protocol.block_names import NamedBlocks
from protocol.requests import FinishReason
from protocol.sampling import Pooling
from services.scheduler.core.apply import ResultApplier
from services.scheduler.core.batch_queue import BatchQueue
from services.scheduler.core.block_loads import BlockLoads
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
from services.scheduler.core.prefix_cache import PrefixCacheControl
from services.scheduler.core.request import Request
from services.scheduler.core.slots import DELIVER, DROP, SlotColumns
from services.scheduler.core.waiting import WaitingQueue
from services.scheduler.policies import SchedulerView
from services.worker.kv_memory import BlockNames
from tests.simulation.driver import play_peers
from tests.simulation.faults import FIRST, Fault, FaultList, assert_caught, parameters
from tests.simulation.workload import draw

FAULTS = FaultList()
FAULTS.returns("no_fence", Ledger, "names", False)
FAULTS.meanwhile("hashes_without_salt", KVCacheManager, "extend_hashes", "request.cache_salt", lambda _: "")
FAULTS.returns("every_adapter_has_a_seat", SchedulerView, "adapters", {})
FAULTS.meanwhile("names_without_contents", KVCacheManager, "extend_hashes", "request.media", lambda _: None)
FAULTS.meanwhile(
    *("prompts_are_cut", StepPlanner, "admit_waiting", "self.epoch.limits"),
    lambda limits: replace(limits, whole_prompts=False),
)
FAULTS.meanwhile("one_step_too_many", StepPlanner, "slices", "self.epoch.slots.limit", lambda limit: limit + 1)
FAULTS.meanwhile("certain_finish_one_early", StepPlanner, "slices", "self.epoch.slots.limit", lambda limit: limit - 1)
FAULTS.returns("evicted_blocks_keep_their_hash", BlockPool, "forget", None)
FAULTS.passes("one_block_too_few", KVCacheManager, "missing", num_tokens=lambda num_tokens: num_tokens - 1)
FAULTS.returns("the_queue_outlives_its_epoch", BatchQueue, "clear", None)
FAULTS.passes("stage_spacing_one_step_short", SlotColumns, "wanted", stages=lambda stages: max(1, stages - 1))
FAULTS.passes("stage_spacing_one_step_long", SlotColumns, "wanted", stages=lambda stages: stages + (stages > 1))
FAULTS.passes(
    "slices_beyond_the_budget_of_decodes", StepPlanner, "slices", budget=lambda budget: replace(budget, decodes=None)
)
FAULTS.passes(
    "slices_beyond_the_chunk", StepPlanner, "slices", budget=lambda budget: replace(budget, chunk=budget.tokens)
)
FAULTS.passes(
    "more_admissions_than_allowed", StepPlanner, "admit_waiting", budget=lambda budget: replace(budget, admissions=None)
)
FAULTS.passes("masks_before_the_token_before_is_known", DeferredMasks, "grammar_output", sampled_before=np.zeros_like)


@FAULTS.add(EpochState, "leave")
def released_when_the_oldest_step_returns(names: Any, self: EpochState, slot: int, state: int) -> None:
    self.running = self.running[self.running != slot]
    self.slots.retire(slot, state)
    if self.ledger.names(slot):
        self.fences.setdefault(self.ledger.oldest, []).append(slot)
    else:
        self.free(slot)


@FAULTS.add(ResultApplier, "deliver_stale")
def stale_tokens_lost(deliver: Any, self: ResultApplier, retired: Any) -> None:
    for slot in retired.tolist():
        self.epoch.slots.request(slot).stale_rows -= 1


@FAULTS.add(Lifecycle, "preempt")
def no_resume_gate(preempt: Any, self: Lifecycle, slot: int, *args: Any, **named: Any) -> None:
    request = self.epoch.slots.request(slot)
    preempt(self, slot, *args, **named)
    request.stale_rows = 0


@FAULTS.add(Lifecycle, "drop_stale")
def stale_rows_survive_an_abort(drop: Any, self: Lifecycle, request: Any) -> None:
    request.stale_rows = 0


@FAULTS.add(Lifecycle, "preempt")
def dropped_rows_are_delivered(preempt: Any, self: Lifecycle, slot: int, cause: Any, stale: int = DELIVER) -> None:
    preempt(self, slot, cause, stale)
    if self.epoch.slots.state[slot] == DROP:
        self.epoch.slots.state[slot] = DELIVER


@FAULTS.add(KVCacheManager, "register")
def next_block_is_registered_too(register: Any, self: KVCacheManager, rows: Any, frontiers: Any) -> None:
    register(self, rows, np.minimum(frontiers + self.block_size, self._slots.capacity[rows]))


@FAULTS.add(KVCacheManager, "find_prefix")
def registered_when_looked_up(find: Any, self: KVCacheManager, request: Any) -> Any:
    """A block is registered before the choice is final, so the cache refers to a block that no step writes."""
    blocks = find(self, request)
    if self.pool.blank and len(request.block_hashes) > len(blocks):
        spare = self.pool.blank[-1]
        if self.pool.hash_of[spare] is None:
            self.pool.take(1)
            self.pool.register(spare, request.block_hashes[len(blocks)])
            self.pool.give_back([spare])
    return blocks


@FAULTS.add(SchedulerView, "adapters")
def one_adapter_holds_back_another(adapters: Any, self: SchedulerView) -> Any:
    """Work conservation: a free seat is not given away."""
    seated = adapters(self)
    return seated | ({"one": 0, "two": 0} if seated else {})


@FAULTS.add(StepPlanner, "encode")
def running_rows_encode_everything(encode: Any, self: StepPlanner, rows: Any, counts: Any) -> int:
    encode(self, rows, counts.copy())
    return int(self.epoch.limits.encoder_budget)


@FAULTS.add(StepPlanner, "encode")
def budget_is_that_of_each_row(encode: Any, self: StepPlanner, rows: Any, counts: Any) -> int:
    for row in range(len(rows)):
        encode(self, rows[row : row + 1], counts[row : row + 1])
    return int(self.epoch.limits.encoder_budget)


@FAULTS.add(StepPlanner, "admit_waiting")
def whole_prompts_must_fit_a_chunk(admit: Any, self: StepPlanner, choice: Any, budget: Any, waiting: Any) -> None:
    head = self.store.waiting.head()
    if not (self.epoch.limits.whole_prompts and head and len(head.token_ids) > budget.chunk):
        admit(self, choice, budget, waiting)


@FAULTS.add(Request, "__init__")
def salt_without_the_adapter(init: Any, self: Request, *args: Any, **named: Any) -> None:
    init(self, *args, **named)
    if self.lora is not None:
        self.cache_salt = self.cache_salt.removeprefix(f"\0{self.lora.digest}:")


@FAULTS.add(KVCacheManager, "find_prefix")
def whole_prompt_is_a_hit(find: Any, self: KVCacheManager, request: Any) -> Any:
    blocks = find(self, request)
    tokens = request.token_ids
    if tokens.size % self.block_size == 0 and self.enable_prefix_caching:
        self.extend_hashes(request, tokens, tokens.size // self.block_size)
        block = self.pool.by_hash.get(request.block_hashes[tokens.size // self.block_size - 1])
        if block is not None and len(blocks) == tokens.size // self.block_size - 1:
            blocks.append(block)
    return blocks


@FAULTS.add(Ledger, "add")
def no_placeholders(add: Any, self: Ledger, step: Any) -> None:
    add(self, step)
    self._slots.placeholders[step.slots] -= step.samples


@FAULTS.add(BatchQueue, "deliver")
def results_matched_by_arrival(deliver: Any, self: BatchQueue, result: Any) -> bool:
    waiting = [step for step in self.steps if step.step_id not in self.results]
    if waiting:
        self.results[waiting[0].step_id] = result
    return bool(waiting)


@FAULTS.add(BlockPool, "hold")
def hit_on_a_free_block_leaves_it_free(hold: Any, self: BlockPool, blocks: Any) -> None:
    for block in blocks:
        self.refs[block] += 1


@FAULTS.add(SlotColumns, "set_stop_ids")
def stop_ids_leak_to_the_next_owner(set_ids: Any, self: SlotColumns, slot: int, ids: Any) -> None:
    if ids:
        set_ids(self, slot, ids)


@FAULTS.add(SlotColumns, "assign")
def min_tokens_ignored(assign: Any, self: SlotColumns, request: Any, max_model_len: int) -> int:
    slot = int(assign(self, request, max_model_len))
    self.stops_from[slot] = 0
    return slot


@FAULTS.add(WaitingQueue, "add")
def a_preempted_request_loses_its_last_token(add: Any, self: WaitingQueue, request: Any) -> None:
    if request.num_preemptions and len(request.token_ids) > request.num_prompt_tokens:
        request.token_ids = request.token_ids[:-1]
    add(self, request)


@FAULTS.add(EpochState, "free")
def workers_are_not_notified_of_released_slots(free: Any, self: EpochState, slot: int) -> None:
    free(self, slot)
    self.released.clear()


@FAULTS.add(Ledger, "add")
def every_chunk_samples(add: Any, self: Ledger, step: Any) -> None:
    step.samples[:] = True
    add(self, step)


@FAULTS.add(Lifecycle, "finish")
def finished_twice(finish: Any, self: Lifecycle, request: Request, message: Any) -> None:
    finish(self, request, message)
    if message is not None and message.reason in (FinishReason.STOP, FinishReason.LENGTH):
        self.store.outputs.finish(request.frontend, request.finish_message(FinishReason.LENGTH))


@FAULTS.add(EpochState, "void")
def a_void_leaves_a_fence(void: Any, self: EpochState) -> None:
    kept = dict(list(self.fences.items())[:1])
    for step_id in kept:
        del self.fences[step_id]
    void(self)
    self.fences.update(kept)


@FAULTS.add(EpochState, "void")
def a_void_keeps_a_cached_block(void: Any, self: EpochState) -> None:
    pool = self.kv.pool
    kept = list(pool.by_hash.items())[:1]
    void(self)
    for block_hash, block in kept:
        pool.take(pool.num_free)
        pool.register(block, block_hash)
        pool.give_back(range(pool.num_blocks))


@FAULTS.add(Lifecycle, "void")
def a_void_leaves_requests_gated(void: Any, self: Lifecycle) -> None:
    gates = {request: request.stale_rows for request in self.store.waiting}
    void(self)
    for request, stale_rows in gates.items():
        request.stale_rows = stale_rows


@FAULTS.add(Lifecycle, "void")
def a_void_counts_promised_tokens_as_known(void: Any, self: Lifecycle) -> None:
    for slot in self.epoch.running.tolist():
        if self.epoch.slots.placeholders[slot]:
            self.epoch.slots.tokens[slot] -= 1
    void(self)


@FAULTS.add(EpochState, "void")
def a_void_leaves_a_release_notice(void: Any, self: EpochState) -> None:
    void(self)
    self.released.append(0)


@FAULTS.add(EngineCore, "start_epoch")
def an_epoch_without_its_number(start: Any, self: Any, limits: Any, policy: Any, number: Any) -> Any:
    return start(self, limits, policy, self.epoch.number)


@FAULTS.add(EngineCore, "on_result")
def results_of_any_epoch_are_applied(on_result: Any, self: EngineCore, result: Any) -> None:
    on_result(self, msgspec.structs.replace(result, epoch=self.epoch.number))


@FAULTS.add(Lifecycle, "finish")
def requests_that_do_not_fit_stay(finish: Any, self: Lifecycle, request: Request, message: Any) -> None:
    if message is None or "in which it does not fit" not in message.message:
        finish(self, request, message)


@FAULTS.add(EngineCore, "start_epoch")
def a_new_epoch_loses_a_request(start: Any, self: EngineCore, limits: Any, policy: Any, number: int) -> None:
    for request in list(self.store.waiting)[-1:]:
        self.store.waiting.remove(request)
    start(self, limits, policy, number)


@FAULTS.add(SlotColumns, "wanted")
def stage_spacing_of_confirmed_tokens(wanted: Any, self: SlotColumns, rows: Any, next_step: int, stages: int) -> Any:
    want = wanted(self, rows, next_step, stages)
    if stages > 1:
        want[(self.sampled_step[rows] > 0) & (next_step - self.sampled_step[rows] < stages)] = 0
    return want


@FAULTS.add(SlotColumns, "assign")
def stage_spacing_of_the_last_owner(assign: Any, self: SlotColumns, request: Any, max_model_len: int) -> int:
    before = int(self.sampled_step[self.free[0]])
    slot = int(assign(self, request, max_model_len))
    self.sampled_step[slot] = before
    self.placeholders[slot] = before > 0
    return slot


@FAULTS.add(StepPlanner, "admit_waiting")
def admission_beyond_the_prefill_budget(admit: Any, self: StepPlanner, choice: Any, *args: Any) -> None:
    choice.prefill_left = choice.tokens_left
    admit(self, choice, *args)


@FAULTS.add(DeferredMasks, "grammar_output")
def masks_of_other_rows(output: Any, self: DeferredMasks, *arguments: Any) -> Any:
    grammar = output(self, *arguments)
    if grammar is None or len(grammar.slots) < 8:
        return grammar
    masks = np.frombuffer(grammar.bitmask, np.int32).reshape(len(grammar.slots) // 4, -1)
    return msgspec.structs.replace(grammar, bitmask=masks[::-1].tobytes())


@FAULTS.add(EngineCore, "on_grammar")
def a_grammar_ignores_replayed_tokens(on_grammar: Any, self: EngineCore, ticket: int, grammar: Any) -> None:
    fresh = copy(grammar)
    on_grammar(self, ticket, grammar)
    for request in self.store.waiting:
        if request.grammar is grammar:
            request.grammar = fresh


@FAULTS.add(Request, "matching")
def a_failed_grammar_is_overlooked(matches: Any, self: Request, token_ids: list[int]) -> int:
    matches(self, token_ids)
    return len(token_ids)


@FAULTS.add(CompilingRequests, "cancel")
def a_ticket_outlives_its_aborted_request(cancel: Any, self: CompilingRequests, request: Request) -> bool:
    """The ticket of the grammar stays when its request ends."""
    before = dict(self.by_ticket)
    cancelled = bool(cancel(self, request))
    self.by_ticket = before
    return cancelled


@FAULTS.add(ResultApplier, "wanted_logprobs")
def logprobs_of_requests_that_left(wanted: Any, self: ResultApplier, logprobs: Any) -> Any:
    return logprobs


@FAULTS.add(KVCacheManager, "find_prefix")
def every_request_reads_the_prefix_cache(find: Any, self: KVCacheManager, request: Request) -> Any:
    params, pooling = request.params, request.pooling
    request.params = msgspec.structs.replace(params, prompt_logprobs=None)
    request.pooling = Pooling.NONE
    try:
        return find(self, request)
    finally:
        request.params, request.pooling = params, pooling


@FAULTS.add(KVCacheManager, "register")
def whole_when_dispatched(register: Any, self: KVCacheManager, rows: Any, frontiers: Any) -> None:
    register(self, rows, frontiers)
    self.note_whole(rows, frontiers)


@FAULTS.add(KVCacheManager, "note_whole")
def whole_one_step_too_early(note: Any, self: KVCacheManager, rows: Any, confirmed: Any) -> None:
    """Positions of the steps in flight count as written."""
    note(self, rows, np.minimum(self._slots.computed[rows], self._slots.tokens[rows]))


TIER_FAULTS = FaultList()
SELDOM = {"pins_that_do_not_fit_stay"}
"""Faults that take many seeds to show."""
TIER_FAULTS.passes("pins_may_take_all_blocks", Pins, "add", limits=lambda limits: replace(limits, max_model_len=1))
TIER_FAULTS.returns("pins_keep_the_blocks_of_a_lost_epoch", Pins, "release", None)
TIER_FAULTS.returns("pins_that_do_not_fit_stay", Pins, "fit", None)
TIER_FAULTS.passes("the_last_dropped_block_stays", KVCacheManager, "drop", names=lambda names: names[:-1])
TIER_FAULTS.returns("workers_keep_dropped_names", BlockNames, "forget", None)
TIER_FAULTS.returns("workers_keep_the_names_of_rewritten_blocks", BlockNames, "drop", None)


@TIER_FAULTS.add(BlockNames, "fill")
def workers_fill_blocks_that_were_given_away(fill: Any, self: Any, block: int, ticket: int, write: Any) -> bool:
    write()
    return True


@TIER_FAULTS.add(BlockLoads, "wait_for")
def found_before_it_is_loaded(wait_for: Any, self: BlockLoads, request: Any, prefix: Any) -> bool:
    """The blocks of a load count when it is sent."""
    waits = bool(wait_for(self, request, prefix))
    for sent in self.store.loading:
        for block, name in zip(sent.blocks, sent.names, strict=True):
            self.kv.pool.register(block, name)
    return waits


@TIER_FAULTS.add(PrefixCacheControl, "on_loaded")
def a_load_fills_all_it_asked_for(on_loaded: Any, self: Any, epoch: int, ticket: int, count: int) -> None:
    load = self.store.loading.by_ticket.get(ticket)
    on_loaded(self, epoch, ticket, len(load.blocks) if load is not None else count)


@TIER_FAULTS.add(KVCacheManager, "reserve")
def blocks_before_a_load_may_be_evicted(reserve: Any, self: KVCacheManager, prefix: Any, count: int) -> Any:
    blocks = reserve(self, prefix, count)
    self.pool.give_back(reversed(prefix))
    return blocks


@TIER_FAULTS.add(Lifecycle, "finish")
def a_load_outlives_its_aborted_request(finish: Any, self: Lifecycle, request: Request, message: Any) -> None:
    load = self.store.loading.load_of.get(request)
    finish(self, request, message)
    if load is not None and self.store.loading.by_ticket.get(load.ticket) is None:
        load.requests.append(request)
        self.store.waiting.add(request)


@TIER_FAULTS.add(Pins, "hold")
def pins_hold_no_blocks(hold: Any, self: Pins, kv: Any) -> None:
    before = [pin.blocks for pin in self]
    hold(self, kv)
    for pin, held in zip(self, before, strict=True):
        kv.pool.give_back(block for block in pin.blocks if block not in held)


@TIER_FAULTS.add(Lifecycle, "drop_blocks")
def a_load_outlives_a_drop(drop: Any, self: Any, names: Any) -> Any:
    return self.epoch.kv.drop(names)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=pytest.mark.soak if fault.name in SELDOM else ())
        for fault in TIER_FAULTS
    ],
)
def test_fault_of_loads_is_caught(fault: Fault) -> None:
    assert_caught(fault, tier=True)


def assert_caught_by_peers() -> None:
    runs = ((seed, depth) for seed in (*FIRST, *range(30)) for depth in draw(seed).depths[:3])
    with pytest.raises(AssertionError, match=r"prefix-cache content|foreign or unwritten KV"):
        deque(starmap(play_peers, runs), maxlen=0)


def _ended(names: BlockNames) -> int:
    return 1 << 62


def test_a_worker_that_serves_blocks_of_steps_in_flight_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockNames, "executed", property(_ended, lambda names, step: None), raising=False)
    assert_caught_by_peers()


def test_a_worker_that_leaves_blocks_that_are_not_confirmed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next epoch adopts blocks that a step in flight was to complete."""

    def held(names: BlockNames) -> NamedBlocks | None:
        names._numbers[names._completed > 0] = 1  # noqa: SLF001
        return whole(names)

    whole = BlockNames.held
    monkeypatch.setattr(BlockNames, "held", held)
    assert_caught_by_peers()


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_fault_is_caught(fault: Fault) -> None:
    assert_caught(fault)
