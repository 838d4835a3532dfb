"""The budgets of `balanced` with the production planner and applier, results in the order of dispatch, no clock."""

from collections import deque
from random import Random
from unittest.mock import patch

import numpy as np
import pytest

from services.scheduler.core.apply import ResultApplier
from services.scheduler.core.drafting import NO_DRAFTING
from services.scheduler.core.epoch import EpochState
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.limits import Limits
from services.scheduler.core.plan import StepPlanner
from services.scheduler.core.request import Request
from services.scheduler.core.store import RequestStore
from services.scheduler.policies import BalancedPolicy, ChunkedPolicy, StepBudget
from services.scheduler.policies.balanced import MIN_CHUNK
from tests.simulation.requests import request
from tests.simulation.results import one_token_each


class Pipeline:
    """A planner and an applier with `depth` steps in flight."""

    def __init__(self, limits: Limits, depth: int | None = None) -> None:
        self.store = RequestStore()
        self.epoch = EpochState(1, limits, BalancedPolicy(), self.store)
        lifecycle = Lifecycle(self.store, self.epoch)
        self.planner = StepPlanner(self.store, self.epoch, lifecycle, NO_DRAFTING)
        self.applier = ResultApplier(self.store, self.epoch, lifecycle, NO_DRAFTING)
        self.depth = depth or limits.stages + 1
        self.inflight: deque[InflightStep] = deque()
        self._requests = 0

    def add(self, prompt: int, output: int = 1000) -> Request:
        added = request([self._requests + 1] * prompt, self._requests, max_tokens=output)
        self._requests += 1
        self.store.waiting.add(added)
        return added

    def budget(self) -> StepBudget:
        return self.epoch.policy.begin(self.epoch.view(self.store.waiting))

    def form(self) -> InflightStep | None:
        planned = self.planner.schedule()
        if planned is None:
            return None
        self.inflight.append(planned[0])
        return planned[0]

    def result(self) -> None:
        step = self.inflight.popleft()
        tokens = np.full(int(step.samples.sum()), 5, np.int32)
        self.applier.apply(step, one_token_each(tokens))

    def step(self) -> InflightStep:
        """Form the next step as soon as the queue has room and a request can be computed."""
        while len(self.inflight) >= self.depth:
            self.result()
        while (step := self.form()) is None:
            self.result()
        return step

    def cohort(self, size: int, output: int = 1000) -> None:
        """Add `size` requests whose prefill shares one step, as a greedy policy forms it."""
        policy, self.epoch.policy = self.epoch.policy, ChunkedPolicy()
        for _ in range(size):
            self.add(8, output)
        step = self.form()
        assert len(step.slots) == size
        self.epoch.policy = policy


def limits(stages: int = 4, **changes: int) -> Limits:
    sizes = {"max_num_seqs": 512, "max_num_batched_tokens": 65536, "max_model_len": 16384, "num_blocks": 20_000}
    return Limits(**(sizes | changes), block_size=16, enable_prefix_caching=False, stages=stages)  # type: ignore[arg-type]


def tokens(step: InflightStep) -> int:
    return int(step.counts.sum())


@pytest.mark.parametrize("seed", range(40))
def test_microbatches_differ_by_one_decode_after_two_rounds(seed: int) -> None:
    rng = Random(seed)
    stages = rng.choice((2, 3, 4, 8))
    pipeline = Pipeline(limits(stages), depth=rng.choice((stages, stages + 1)))
    cohorts = [rng.randint(1, 40) for _ in range(rng.randint(1, stages))]
    for size in cohorts:
        pipeline.cohort(size)
    if rng.random() < 0.5:  # nothing is in flight: all are ready at once
        while pipeline.inflight:
            pipeline.result()
    for _ in range(2 * stages):
        pipeline.step()
    sizes = [tokens(pipeline.step()) for _ in range(4 * stages)]
    if sum(cohorts) >= stages:
        assert max(sizes) - min(sizes) <= 1
        assert all(sum(sizes[i : i + stages]) == sum(cohorts) for i in range(3 * stages))
    else:
        assert set(sizes) == {1}


@pytest.mark.parametrize(("bound", "admitted"), [({}, 256), ({"num_blocks": 1000}, 125), ({"max_num_seqs": 8}, 8)])
def test_prompts_that_blocks_and_seats_admit_fill_equal_microbatches(bound: dict[str, int], admitted: int) -> None:
    """The first round prefills only these: what cannot be admitted does not inflate the budget."""
    pipeline = Pipeline(limits(**bound))
    for _ in range(256):
        pipeline.add(128)
    assert [tokens(pipeline.step()) for _ in range(4)] == [admitted * 128 // 4] * 4


@pytest.mark.parametrize("seed", range(20))
def test_a_round_of_budgets_covers_the_demand(seed: int) -> None:
    """With room for all, the demand is decodes, remaining prefill, and prefill of all waiting requests."""
    rng = Random(seed)
    stages = rng.choice((2, 3, 4, 8))
    pipeline = Pipeline(limits(stages, max_num_batched_tokens=rng.choice((100, 500, 65536))))
    for _ in range(rng.randint(1, 60)):
        pipeline.add(rng.choice((1, 30, 128, 700)))
    for _ in range(rng.randint(0, 12)):
        pipeline.step()
    for _ in range(rng.randint(0, 60)):
        pipeline.add(rng.choice((1, 30, 128, 700)))
    s, rows = pipeline.epoch.slots, pipeline.epoch.running
    most = pipeline.epoch.limits.max_num_batched_tokens
    left = np.maximum(s.entry[rows] - s.computed[rows], 0)
    demand = int((left == 0).sum()) + int(left.sum()) + pipeline.store.waiting.num_tokens
    budgets = 0
    for _ in range(stages):
        budgets += pipeline.budget().tokens
        pipeline.form()
    assert budgets >= min(demand, stages * most)


def test_a_prompt_far_above_the_budget_progresses_in_chunks_and_small_ones_are_served() -> None:
    pipeline = Pipeline(limits(max_num_batched_tokens=500))
    small = [pipeline.add(20, output=10) for _ in range(4)]
    for _ in range(6):
        pipeline.step()
    head = pipeline.add(10_000)
    late = [pipeline.add(20, output=10) for _ in range(4)]
    done_before_head = 0
    for _ in range(200):
        step = pipeline.step()
        assert tokens(step) <= 500
        done_before_head += all(request.finished for request in small)
        if all(request.finished for request in late):
            break
    assert done_before_head
    assert head.slot >= 0
    assert pipeline.epoch.slots.computed[head.slot] >= 10_000


def test_a_few_tokens_of_prefill_are_not_cut_smaller() -> None:
    pipeline = Pipeline(limits())
    pipeline.add(100)
    assert [tokens(pipeline.step()) for _ in range(2)] == [MIN_CHUNK, 100 - MIN_CHUNK]


def test_every_ready_request_gets_its_turn_while_prompts_stream_in() -> None:
    pipeline, last = Pipeline(limits(max_num_batched_tokens=128)), {}
    pipeline.cohort(15)
    pipeline.cohort(15)
    longest = 0
    for index in range(400):
        if index % 3 == 0:
            pipeline.add(200, output=3)
        step = pipeline.step()
        for slot, entry in zip(step.slots.tolist(), pipeline.epoch.slots.order_key[step.slots].tolist(), strict=True):
            if entry < 30:
                longest = max(longest, step.step_id - last.get(slot, step.step_id))
                last[slot] = step.step_id
    assert len(last) == 30
    assert longest <= 4 + 5, "four steps of spacing, and at most five more"


def test_no_request_starves_if_a_step_holds_fewer_than_its_share() -> None:
    """With four tokens per step, thirty decodes and two stages, the first are ready again before the last were
    scheduled."""
    pipeline, last, longest = Pipeline(limits(2)), {}, 0
    pipeline.cohort(30)
    pipeline.epoch.limits = limits(2, max_num_batched_tokens=4)
    for _ in range(120):
        step = pipeline.step()
        for slot in step.slots.tolist():
            longest = max(longest, step.step_id - last.get(slot, step.step_id))
            last[slot] = step.step_id
    assert len(last) == 30
    assert longest <= -(-30 // 4)


def test_requests_that_end_for_certain_are_no_demand() -> None:
    """Their last token is in flight: a step that counts them would be too large for the others."""
    pipeline = Pipeline(limits())
    pipeline.cohort(20, output=1)
    pipeline.cohort(4)
    assert len(pipeline.epoch.running) == 24
    assert [pipeline.budget().decodes, pipeline.budget().prefill] == [1, 0]


@pytest.mark.parametrize("seed", range(30))
def test_budgets_stay_within_their_range(seed: int) -> None:
    rng = Random(seed)
    pipeline = Pipeline(
        limits(rng.choice((2, 4)), max_num_batched_tokens=rng.choice((1, 2, 7, 64)), num_blocks=rng.randint(20, 60))
    )
    for _ in range(rng.randint(0, 20)):
        pipeline.add(rng.randint(1, 100), output=rng.randint(1, 50))
    for _ in range(80):
        budget, most = pipeline.budget(), pipeline.epoch.limits.max_num_batched_tokens
        assert 1 <= budget.tokens <= most
        assert budget.decodes is not None
        assert budget.decodes >= 1
        step = pipeline.form()
        assert step is None or tokens(step) <= most
        if len(pipeline.inflight) >= pipeline.depth or (step is None and pipeline.inflight):
            pipeline.result()


def test_calling_the_policy_changes_nothing() -> None:
    """Queues, blocks and columns stay the same, whether requests wait, prefill, decode or are in flight."""
    pipeline = Pipeline(limits(num_blocks=200))
    for _ in range(40):
        pipeline.add(128)
    for _ in range(7):
        pipeline.step()
    epoch, waiting = pipeline.epoch, pipeline.store.waiting
    view = epoch.view(waiting)

    def state() -> list[object]:
        columns = [value.tobytes() for value in vars(epoch.slots).values() if isinstance(value, np.ndarray)]
        return [
            *columns,
            [request.number for request in waiting],
            waiting.num_tokens,
            epoch.running.tolist(),
            epoch.kv.num_free,
            list(epoch.slots.free),
            (epoch.ledger.oldest, epoch.next_step),
            vars(epoch.policy).copy(),
        ]

    before = state()
    answers = [(epoch.policy.begin(view), epoch.policy.order(view).tolist()) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    assert state() == before


def test_the_walk_over_waiting_requests_ends_with_seats_blocks_and_budget() -> None:
    """The cost of a step depends on what it may admit, not on the number of waiting requests."""

    def examined(**changes: int) -> int:
        pipeline = Pipeline(limits(**changes))
        for _ in range(400):
            pipeline.add(128)
        kv = pipeline.epoch.kv
        with patch.object(kv, "find_prefix", wraps=kv.find_prefix) as find_prefix:
            pipeline.budget()
        return int(find_prefix.call_count)

    assert examined() == 400
    assert examined(max_num_seqs=10) <= 11
    assert examined(num_blocks=80) <= 11
    assert examined(max_num_batched_tokens=256) <= 9
