"""Faults in the handling of drafts: the simulator must notice each of them."""

from dataclasses import asdict, replace
from typing import Any

import msgspec
import numpy as np
import pytest

from services.scheduler.core.apply import ResultApplier
from services.scheduler.core.deferred_masks import DeferredMasks
from services.scheduler.core.epoch import EpochState
from services.scheduler.core.kv_cache import KVCacheManager
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.limits import Limits
from services.scheduler.core.plan import StepPlanner
from services.scheduler.core.request import Request
from services.scheduler.core.slots import DELIVER, LIVE, Column, SlotColumns
from tests.simulation.drafts import Speculating
from tests.simulation.faults import Fault, assert_caught, parameters
from tests.simulation.grammar import structured
from tests.simulation.reference import reference
from tests.simulation.test_speculation import ROOMY, prompt_of
from tests.simulation.world import World, params


def rejected_drafts_stay_computed(settle: Any) -> Any:
    """The optimistic position is not lowered."""

    def broken(self: ResultApplier, rows: Any, drafts: Any, sampled: Any, live: Any) -> None:
        before = self.epoch.slots.computed.copy()
        settle(self, rows, drafts, sampled, live)
        self.epoch.slots.computed[:] = before

    return broken


def rejected_drafts_are_settled_twice(settle: Any) -> Any:
    def broken(self: ResultApplier, rows: Any, drafts: Any, sampled: Any, live: Any) -> None:
        before = self.epoch.slots.computed.copy()
        settle(self, rows, drafts, sampled, live)
        self.epoch.slots.computed -= before - self.epoch.slots.computed

    return broken


def one_rejected_draft_too_few(settle: Any) -> Any:
    def broken(self: ResultApplier, rows: Any, drafts: Any, sampled: Any, live: Any) -> None:
        settle(self, rows, drafts, sampled, live)
        mine = live & (drafts - sampled.counts + 1 > 1)
        self.epoch.slots.computed[rows[mine]] += 1

    return broken


def drafts_survive_the_row_that_had_them(add: Any) -> Any:
    """If a step proposes none or fewer, those of an earlier step are planned again."""

    def broken(self: Ledger, step: Any) -> None:
        slots = step.slots[step.samples]
        before = self._slots.proposed[slots].copy()
        add(self, step)
        self._slots.proposed[slots] = np.maximum(before, step.proposes)

    return broken


def a_row_follows_before_its_drafts_can_be_there(wanted: Any) -> Any:
    """The first stage has neither the token nor the drafts yet."""
    return lambda self, rows, next_step, stages: wanted(self, rows, next_step, stages - 1)


def one_draft_more_than_was_requested(wanted: Any) -> Any:
    def broken(self: SlotColumns, rows: Any, next_step: int, stages: int) -> Any:
        self.proposed[rows] += self.proposed[rows] > 0
        try:
            return wanted(self, rows, next_step, stages)
        finally:
            self.proposed[rows] -= self.proposed[rows] > 0

    return broken


def more_drafts_than_the_context_has_room_for(wanted: Any) -> Any:
    def broken(self: SlotColumns, rows: Any, next_step: int, stages: int) -> Any:
        history, self.history = self.history, np.empty((len(self.history), 1 << 20), np.int8)
        try:
            return wanted(self, rows, next_step, stages)
        finally:
            self.history = history

    return broken


def drafts_count_as_certain_tokens(wanted: Any) -> Any:
    """A request counts as certainly finished when its drafts might finish it."""

    def broken(self: SlotColumns, rows: Any, next_step: int, stages: int) -> Any:
        sampling, self.sampling = self.sampling, self.placeholders
        try:
            return wanted(self, rows, next_step, stages)
        finally:
            self.sampling = sampling

    return broken


def drafts_are_not_reserved(add: Any) -> Any:
    """Placeholders count one token for each row."""

    def broken(self: Ledger, step: Any) -> None:
        add(self, step)
        self._slots.placeholders[step.slots] -= step.drafts

    return broken


def tokens_after_a_stop_are_delivered(until: Any) -> Any:
    """The row is not cut."""

    def broken(self: ResultApplier, rows: Any, token_ids: Any, first: Any, counts: Any) -> Any:
        return until(self, rows, token_ids, first, counts)._replace(counts=counts)

    return broken


def a_stop_counts_at_the_end_of_a_row_only(until: Any) -> Any:
    def broken(self: ResultApplier, rows: Any, token_ids: Any, first: Any, counts: Any) -> Any:
        tokens = until(self, rows, token_ids, first, counts)
        early = tokens.counts < counts
        return tokens._replace(counts=counts, ends=tokens.ends & ~early, stops=tokens.stops & ~early)

    return broken


def min_tokens_hold_for_rows_of_one_token(until: Any) -> Any:
    def broken(self: ResultApplier, rows: Any, token_ids: Any, first: Any, counts: Any) -> Any:
        before = self.epoch.slots.stops_from.copy()
        self.epoch.slots.stops_from[rows[counts > 1]] = 0
        try:
            return until(self, rows, token_ids, first, counts)
        finally:
            self.epoch.slots.stops_from[:] = before

    return broken


def drafts_enter_the_prefix_cache_at_dispatch(register: Any) -> Any:
    """Eager registration is for known tokens only."""

    def broken(self: StepPlanner, rows: Any, counts: Any) -> None:
        register(self, rows, counts)
        self.epoch.kv.register(rows, self.epoch.slots.computed[rows] + counts)

    return broken


def drafts_enter_the_prefix_cache_with_their_result(commit: Any) -> Any:
    """Everything up to the optimistic position is registered."""

    def broken(self: KVCacheManager, rows: Any) -> None:
        self.register(rows, self._slots.computed[rows])

    return broken


def tokens_behind_a_stop_enter_the_prefix_cache(commit: Any) -> Any:
    def broken(self: KVCacheManager, rows: Any) -> None:
        self.register(rows, self._slots.committed(rows))

    return broken


def a_stale_row_delivers_behind_its_stop(until: Any) -> Any:
    def broken(self: ResultApplier, rows: Any, token_ids: Any, first: Any, counts: Any) -> Any:
        tokens = until(self, rows, token_ids, first, counts)
        stale = self.epoch.slots.state[rows] == DELIVER
        return tokens._replace(counts=np.where(stale, counts, tokens.counts))

    return broken


def a_preempted_request_waits_for_its_drafts(preempt: Any) -> Any:
    """Stale rows are counted per token that may arrive, not per row."""

    def broken(self: Lifecycle, slot: int, cause: Any, stale: int = DELIVER) -> None:
        sampling = self.epoch.slots.sampling[slot]
        self.epoch.slots.sampling[slot] = self.epoch.slots.placeholders[slot]
        preempt(self, slot, cause, stale)
        self.epoch.slots.sampling[slot] = sampling

    return broken


def a_grammar_looks_at_drafts_of_a_step_before(remember: Any) -> Any:
    """Masks of drafts that another step proposed."""

    def broken(self: ResultApplier, rows: Any, draft_ids: Any) -> None:
        owners = [self.epoch.slots.request(int(row)) for row in rows]
        before = [owner.draft_ids for owner in owners]
        remember(self, rows, draft_ids)
        for owner, ids in zip(owners, before, strict=True):
            if len(ids) == len(owner.draft_ids):
                owner.draft_ids = ids

    return broken


def every_position_has_its_rows_first_mask(output: Any) -> Any:
    def broken(self: DeferredMasks, *arguments: Any) -> Any:
        grammar = output(self, *arguments)
        if grammar is None or not grammar.counts:
            return grammar
        counts = np.frombuffer(grammar.counts, np.int32)
        masks = np.frombuffer(grammar.bitmask, np.int32).reshape(int(counts.sum()), -1)
        first = np.repeat(masks[np.cumsum(counts) - counts], counts, axis=0)
        return msgspec.structs.replace(grammar, bitmask=first.tobytes())

    return broken


def a_grammar_takes_the_rows_last_token_only(matching: Any) -> Any:
    def broken(self: Request, token_ids: list[int]) -> int:
        return len(token_ids) if matching(self, token_ids[-1:]) else 0

    return broken


def logprobs_of_tokens_behind_a_stop(publish: Any) -> Any:
    def broken(self: ResultApplier, logprobs: Any) -> None:
        tokens, self.epoch.slots.tokens = (
            self.epoch.slots.tokens,
            np.full_like(self.epoch.slots.tokens, 1 << 20),
        )
        publish(self, logprobs)
        self.epoch.slots.tokens = tokens

    return broken


def drafts_are_counted_twice(settle: Any) -> Any:
    def broken(self: ResultApplier, rows: Any, drafts: Any, sampled: Any, live: Any) -> None:
        settle(self, rows, drafts, sampled, live)
        self.epoch.slots.drafted[rows] += sampled.drafted

    return broken


def a_preempted_request_loses_its_draft_counts(give: Any) -> Any:
    def broken(self: SlotColumns, slot: int) -> None:
        if self.state[slot] != LIVE:
            self.drafted[slot] = self.accepted[slot] = 0
        give(self, slot)

    return broken


class NoLookahead(Limits):
    """Sizes without blocks for the positions at which a drafter writes KV."""

    def held(self, ends: Column) -> Column:
        return ends


def no_blocks_for_the_lookahead(init: Any) -> Any:
    def broken(self: EpochState, number: int, limits: Limits, *owned: Any) -> None:
        init(self, number, NoLookahead(**asdict(limits)), *owned)

    return broken


FAULTS = [
    Fault("applier", "settle", rejected_drafts_stay_computed),
    Fault("applier", "settle", rejected_drafts_are_settled_twice),
    Fault("applier", "settle", one_rejected_draft_too_few),
    Fault("applier", "settle", drafts_are_counted_twice),
    Fault("slots", "wanted", a_row_follows_before_its_drafts_can_be_there),
    Fault("slots", "wanted", one_draft_more_than_was_requested),
    Fault("slots", "wanted", more_drafts_than_the_context_has_room_for),
    Fault("slots", "wanted", drafts_count_as_certain_tokens),
    Fault("slots", "give_draft_counts", a_preempted_request_loses_its_draft_counts),
    Fault("ledger", "add", drafts_are_not_reserved),
    Fault("ledger", "add", drafts_survive_the_row_that_had_them),
    Fault("applier", "cut", tokens_after_a_stop_are_delivered),
    Fault("applier", "cut", a_stop_counts_at_the_end_of_a_row_only),
    Fault("planner", "register_known", drafts_enter_the_prefix_cache_at_dispatch),
    Fault("kv", "commit", drafts_enter_the_prefix_cache_with_their_result),
    Fault("lifecycle", "preempt", a_preempted_request_waits_for_its_drafts),
    Fault("epoch", "__init__", no_blocks_for_the_lookahead),
]


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_fault_is_caught(fault: Fault) -> None:
    assert_caught(fault, speculates=True)


RARE_FAULTS = [
    Fault("applier", "keep_drafts", a_grammar_looks_at_drafts_of_a_step_before),
    Fault("deferred_masks", "grammar_output", every_position_has_its_rows_first_mask),
    Fault("request", "matching", a_grammar_takes_the_rows_last_token_only),
    Fault("applier", "publish_logprobs", logprobs_of_tokens_behind_a_stop),
    Fault("applier", "cut", min_tokens_hold_for_rows_of_one_token),
    Fault("kv", "commit", tokens_behind_a_stop_enter_the_prefix_cache),
    Fault("applier", "cut", a_stale_row_delivers_behind_its_stop),
]
"""Faults in situations that are rare in random workloads: grammars, log-probabilities, rows that go on behind a
stop."""

NO_FAULT = Fault("waiting", "head", lambda head: head)


def many_stops_and_grammars(fault: Fault) -> None:
    limits, drafts = replace(ROOMY, block_size=4), Speculating("by request", (5,))
    world = World(limits, 2, speculating=drafts, parts=fault.parts, engine=fault.engine)
    for i in range(18):
        stops = range(i, 64, 9 if i % 3 else 4)
        sampling = params(14, *stops, eos=False, min_tokens=4)
        grammar = structured(i) if i % 3 else None
        world.add(prompt_of(5 + i, i), msgspec.structs.replace(sampling, logprobs=1), structured=grammar)
    world.drain()


def displaced_within_a_row_that_stops(fault: Fault) -> None:
    answer = reference(prompt_of(9), params(9, eos=False), 512, 64).tokens
    limits, drafts = replace(ROOMY, max_num_seqs=1), Speculating("always", (5,))
    world = World(limits, 3, use_priority=True, speculating=drafts, parts=fault.parts, engine=fault.engine)
    world.add(prompt_of(9), params(9, answer[3], eos=False), priority=1)
    world.dispatch()
    world.add(prompt_of(5, 1), params(3, eos=False))
    world.drain()
    assert world.coverage["stops while preempted"]


def play_rare_scenarios(fault: Fault) -> None:
    many_stops_and_grammars(fault)
    displaced_within_a_row_that_stops(fault)


def test_without_a_fault_nothing_is_caught() -> None:
    play_rare_scenarios(NO_FAULT)


@pytest.mark.parametrize("fault", parameters(RARE_FAULTS))
def test_rare_fault_is_caught(fault: Fault) -> None:
    with pytest.raises(Exception, match=r"."):
        play_rare_scenarios(fault)
