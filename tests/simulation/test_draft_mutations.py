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
from tests.simulation.faults import Fault, FaultList, assert_caught, parameters
from tests.simulation.grammar import structured
from tests.simulation.reference import reference
from tests.simulation.test_speculation import ROOMY
from tests.simulation.world import World, params, prompt_of

FAULTS = FaultList()
# The first stage has neither the token nor the drafts yet
FAULTS.passes("a_row_follows_before_its_drafts_can_be_there", SlotColumns, "wanted", stages=lambda stages: stages - 1)
FAULTS.meanwhile(
    "one_draft_more_than_was_requested", SlotColumns, "wanted", "self.proposed", lambda drafts: drafts + (drafts > 0)
)
FAULTS.meanwhile(
    *("more_drafts_than_the_context_has_room_for", SlotColumns, "wanted", "self.history"),
    lambda history: np.empty((len(history), 1 << 20), np.int8),
)


@FAULTS.add(ResultApplier, "settle")
def rejected_drafts_stay_computed(
    settle: Any, self: ResultApplier, rows: Any, drafts: Any, sampled: Any, live: Any
) -> None:
    """The optimistic position is not lowered."""
    before = self.epoch.slots.computed.copy()
    settle(self, rows, drafts, sampled, live)
    self.epoch.slots.computed[:] = before


@FAULTS.add(ResultApplier, "settle")
def rejected_drafts_are_settled_twice(
    settle: Any, self: ResultApplier, rows: Any, drafts: Any, sampled: Any, live: Any
) -> None:
    before = self.epoch.slots.computed.copy()
    settle(self, rows, drafts, sampled, live)
    self.epoch.slots.computed -= before - self.epoch.slots.computed


@FAULTS.add(ResultApplier, "settle")
def one_rejected_draft_too_few(
    settle: Any, self: ResultApplier, rows: Any, drafts: Any, sampled: Any, live: Any
) -> None:
    settle(self, rows, drafts, sampled, live)
    mine = live & (drafts - sampled.counts + 1 > 1)
    self.epoch.slots.computed[rows[mine]] += 1


@FAULTS.add(Ledger, "add")
def drafts_survive_the_row_that_had_them(add: Any, self: Ledger, step: Any) -> None:
    """If a step proposes none or fewer, those of an earlier step are planned again."""
    slots = step.slots[step.samples]
    before = self._slots.proposed[slots].copy()
    add(self, step)
    self._slots.proposed[slots] = np.maximum(before, step.proposes)


@FAULTS.add(SlotColumns, "wanted")
def drafts_count_as_certain_tokens(wanted: Any, self: SlotColumns, rows: Any, next_step: int, stages: int) -> Any:
    """A request counts as certainly finished when its drafts might finish it."""
    sampling, self.sampling = self.sampling, self.placeholders
    try:
        return wanted(self, rows, next_step, stages)
    finally:
        self.sampling = sampling


@FAULTS.add(Ledger, "add")
def drafts_are_not_reserved(add: Any, self: Ledger, step: Any) -> None:
    """Placeholders count one token for each row."""
    add(self, step)
    self._slots.placeholders[step.slots] -= step.drafts


@FAULTS.add(StepPlanner, "commit")
def a_step_of_a_rest_proposes_drafts(commit: Any, self: StepPlanner, choice: Any) -> Any:
    step, plan = commit(self, choice)
    return step, msgspec.structs.replace(plan, speculation_rests=True)


@FAULTS.add(ResultApplier, "cut")
def tokens_after_a_stop_are_delivered(until: Any, self: ResultApplier, rows: Any, ids: Any, counts: Any) -> Any:
    """The row is not cut."""
    return until(self, rows, ids, counts)._replace(counts=counts)


@FAULTS.add(ResultApplier, "cut")
def a_stop_counts_at_the_end_of_a_row_only(until: Any, self: ResultApplier, rows: Any, ids: Any, counts: Any) -> Any:
    tokens = until(self, rows, ids, counts)
    early = tokens.counts < counts
    return tokens._replace(counts=counts, ends=tokens.ends & ~early, stops=tokens.stops & ~early)


RARE_FAULTS = FaultList()
"""Faults in situations that are rare in random workloads: grammars, log-probabilities, rows that go on behind a
stop."""
RARE_FAULTS.meanwhile(
    *("logprobs_of_tokens_behind_a_stop", ResultApplier, "publish_logprobs", "self.epoch.slots.tokens"),
    lambda tokens: np.full_like(tokens, 1 << 20),
)


@RARE_FAULTS.add(ResultApplier, "cut")
def min_tokens_hold_for_rows_of_one_token(until: Any, self: ResultApplier, rows: Any, ids: Any, counts: Any) -> Any:
    before = self.epoch.slots.stops_from.copy()
    self.epoch.slots.stops_from[rows[counts > 1]] = 0
    try:
        return until(self, rows, ids, counts)
    finally:
        self.epoch.slots.stops_from[:] = before


@FAULTS.add(StepPlanner, "register_known")
def drafts_enter_the_prefix_cache_at_dispatch(register: Any, self: StepPlanner, rows: Any, counts: Any) -> None:
    """Eager registration is for known tokens only."""
    register(self, rows, counts)
    self.epoch.kv.register(rows, self.epoch.slots.computed[rows] + counts)


@FAULTS.add(KVCacheManager, "commit")
def drafts_enter_the_prefix_cache_with_their_result(commit: Any, self: KVCacheManager, rows: Any) -> None:
    """Everything up to the optimistic position is registered."""
    self.register(rows, self._slots.computed[rows])


@RARE_FAULTS.add(KVCacheManager, "commit")
def tokens_behind_a_stop_enter_the_prefix_cache(commit: Any, self: KVCacheManager, rows: Any) -> None:
    self.register(rows, self._slots.committed(rows))


@RARE_FAULTS.add(ResultApplier, "cut")
def a_stale_row_delivers_behind_its_stop(until: Any, self: ResultApplier, rows: Any, ids: Any, counts: Any) -> Any:
    tokens = until(self, rows, ids, counts)
    stale = self.epoch.slots.state[rows] == DELIVER
    return tokens._replace(counts=np.where(stale, counts, tokens.counts))


@FAULTS.add(Lifecycle, "preempt")
def a_preempted_request_waits_for_its_drafts(
    preempt: Any, self: Lifecycle, slot: int, cause: Any, stale: int = DELIVER
) -> None:
    """Stale rows are counted per token that may arrive, not per row."""
    sampling = self.epoch.slots.sampling[slot]
    self.epoch.slots.sampling[slot] = self.epoch.slots.placeholders[slot]
    preempt(self, slot, cause, stale)
    self.epoch.slots.sampling[slot] = sampling


@RARE_FAULTS.add(ResultApplier, "keep_drafts")
def a_grammar_looks_at_drafts_of_a_step_before(remember: Any, self: ResultApplier, rows: Any, draft_ids: Any) -> None:
    """Masks of drafts that another step proposed."""
    owners = [self.epoch.slots.request(int(row)) for row in rows]
    before = [owner.draft_ids for owner in owners]
    remember(self, rows, draft_ids)
    for owner, ids in zip(owners, before, strict=True):
        if len(ids) == len(owner.draft_ids):
            owner.draft_ids = ids


@RARE_FAULTS.add(DeferredMasks, "grammar_output")
def every_position_has_its_rows_first_mask(output: Any, self: DeferredMasks, *arguments: Any) -> Any:
    grammar = output(self, *arguments)
    if grammar is None or not grammar.counts:
        return grammar
    counts = np.frombuffer(grammar.counts, np.int32)
    masks = np.frombuffer(grammar.bitmask, np.int32).reshape(int(counts.sum()), -1)
    first = np.repeat(masks[np.cumsum(counts) - counts], counts, axis=0)
    return msgspec.structs.replace(grammar, bitmask=first.tobytes())


@RARE_FAULTS.add(Request, "matching")
def a_grammar_takes_the_rows_last_token_only(matching: Any, self: Request, token_ids: list[int]) -> int:
    return len(token_ids) if matching(self, token_ids[-1:]) else 0


@FAULTS.add(ResultApplier, "settle")
def drafts_are_counted_twice(settle: Any, self: ResultApplier, rows: Any, drafts: Any, sampled: Any, live: Any) -> None:
    settle(self, rows, drafts, sampled, live)
    self.epoch.slots.drafted[rows] += sampled.drafted


@FAULTS.add(SlotColumns, "give_draft_counts")
def a_preempted_request_loses_its_draft_counts(give: Any, self: SlotColumns, slot: int) -> None:
    if self.state[slot] != LIVE:
        self.drafted[slot] = self.accepted[slot] = 0
    give(self, slot)


class NoLookahead(Limits):
    """Sizes without blocks for the positions at which a drafter writes KV."""

    def held(self, ends: Column) -> Column:
        return ends


@FAULTS.add(EpochState, "__init__")
def no_blocks_for_the_lookahead(init: Any, self: EpochState, number: int, limits: Limits, *owned: Any) -> None:
    init(self, number, NoLookahead(**asdict(limits)), *owned)


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_fault_is_caught(fault: Fault) -> None:
    assert_caught(fault, speculates=True)


def many_stops_and_grammars() -> None:
    limits, drafts = replace(ROOMY, block_size=4), Speculating("by request", (5,))
    world = World(limits, 2, speculating=drafts)
    for i in range(18):
        stops = range(i, 64, 9 if i % 3 else 4)
        sampling = params(14, *stops, eos=False, min_tokens=4)
        grammar = structured(i) if i % 3 else None
        world.add(prompt_of(5 + i, i), msgspec.structs.replace(sampling, logprobs=1), structured=grammar)
    world.drain()


def displaced_within_a_row_that_stops() -> None:
    answer = reference(prompt_of(9), params(9, eos=False), 512, 64).tokens
    limits, drafts = replace(ROOMY, max_num_seqs=1), Speculating("always", (5,))
    world = World(limits, 3, use_priority=True, speculating=drafts)
    world.add(prompt_of(9), params(9, answer[3], eos=False), priority=1)
    world.dispatch()
    world.add(prompt_of(5, 1), params(3, eos=False))
    world.drain()
    assert world.coverage["stops while preempted"]


def play_rare_scenarios() -> None:
    many_stops_and_grammars()
    displaced_within_a_row_that_stops()


def test_without_a_fault_nothing_is_caught() -> None:
    play_rare_scenarios()


@pytest.mark.parametrize("fault", parameters(RARE_FAULTS))
def test_rare_fault_is_caught(fault: Fault) -> None:
    with fault.injected(), pytest.raises(Exception, match=r"."):
        play_rare_scenarios()
