"""The simulator can fail: each fault below is put into the production classes on purpose and must be caught."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from protocol.requests import FinishReason
from services.scheduler.batch_queue import BatchQueue
from services.scheduler.block_pool import BlockPool
from services.scheduler.kv_cache import KVCacheManager
from services.scheduler.ledger import Ledger
from services.scheduler.scheduler import Scheduler
from services.scheduler.slots import DELIVER, DROP, SlotTable
from services.scheduler.waiting import WaitingQueue
from tests.simulation.driver import play

SEEDS = 150
"""Within so many seeds, at depths 2 and 3, each fault must show."""

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
    return lambda self, rows, token_ids: None


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
    def broken(self: Scheduler, slot: int, stale: int = DELIVER) -> None:
        preempt(self, slot, stale)
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


FAULTS: list[Fault] = [
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


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[2].__name__)
def test_fault_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken = fault
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    for seed in range(SEEDS):
        for depth in (2, 3):
            try:
                play(seed, depth)
            except Exception:
                return
    pytest.fail(f"{SEEDS} seeds did not notice: {broken.__name__}")
