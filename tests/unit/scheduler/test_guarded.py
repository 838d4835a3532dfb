"""A policy that fails in every way, under the production engine: requests are served all the same."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protocol.codec import unpack
from protocol.requests import FinishReason
from protocol.steps import SchedulerOutput
from services.config import SchedulerConfig
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import Request
from services.scheduler.core.slots import SlotIds
from services.scheduler.policies import (
    BUILT_IN,
    BalancedPolicy,
    BatchingPolicy,
    ChunkedPolicy,
    GuardedPolicy,
    SchedulerView,
    StepBudget,
    make_policy,
)  # fmt: skip
from tests.simulation.requests import finishes, generate, plans
from tests.simulation.results import result_of

LIMITS = Limits(8, 64, 128, 64, 16, stages=2)


class Faulty(ChunkedPolicy):
    """`chunked`, with answers that the test replaces."""

    def __init__(
        self,
        budget: Callable[[StepBudget], Any] = lambda budget: budget,
        rows: Callable[[SlotIds], Any] = lambda rows: rows,
        slice_: Callable[[int, int], Any] = lambda hit, count: (hit, count),
    ) -> None:
        super().__init__()
        self._budget, self._rows, self._slice = budget, rows, slice_

    def begin(self, view: SchedulerView) -> StepBudget:
        return self._budget(super().begin(view))

    def order(self, view: SchedulerView) -> SlotIds:
        return self._rows(super().order(view))

    def admit(self, view: SchedulerView, request: Request, hit: int, count: int) -> tuple[int, int]:
        return self._slice(hit, count)


def broken(*_: object) -> Any:
    raise ZeroDivisionError("a policy's mistake")


FAULTS = {
    "begin raises": Faulty(budget=broken),
    "order raises": Faulty(rows=broken),
    "admit raises": Faulty(slice_=broken),
    "no budget": Faulty(budget=lambda _: None),
    "budget 0": Faulty(budget=lambda b: replace(b, tokens=0)),
    "budget below 0": Faulty(budget=lambda b: replace(b, tokens=-3)),
    "budget above the limit": Faulty(budget=lambda b: replace(b, tokens=65)),
    "chunk 0": Faulty(budget=lambda b: replace(b, chunk=0)),
    "half a token": Faulty(budget=lambda b: replace(b, tokens=b.tokens / 2)),
    "half a token of prefill": Faulty(budget=lambda b: replace(b, prefill=b.tokens / 2)),
    "neither decodes nor prefill": Faulty(budget=lambda b: replace(b, decodes=0, prefill=0)),
    "prefill below 0": Faulty(budget=lambda b: replace(b, prefill=-1)),
    "slots that are not running": Faulty(rows=lambda rows: np.arange(LIMITS.num_slots)),
    "slots beyond the table": Faulty(rows=lambda rows: np.append(rows, 1000)),
    "a slot twice": Faulty(rows=lambda rows: np.concatenate((rows, rows))),
    "no slots": Faulty(rows=lambda rows: None),
    "a list of slots": Faulty(rows=lambda rows: rows.tolist()),
    "a slot below 0": Faulty(rows=lambda rows: rows[-1:] - LIMITS.num_slots),
    "a mask of slots": Faulty(rows=lambda rows: np.ones(1, bool)),
    "slots in two dimensions": Faulty(rows=lambda rows: rows[None]),
    "more cached tokens than there are": Faulty(slice_=lambda hit, count: (hit + 16, count)),
    "half a block of cache": Faulty(slice_=lambda hit, count: (hit + 1, count)),
    "a slice above the offer": Faulty(slice_=lambda hit, count: (hit, count + 1)),
    "a slice below 0": Faulty(slice_=lambda hit, count: (hit, -1)),
    "half a token of a slice": Faulty(slice_=lambda hit, count: (hit, count / 2)),
}


def serve(policy: BatchingPolicy, requests: int = 12) -> tuple[list[FinishReason], list[SchedulerOutput]]:
    """Serve requests; return their finish reasons and every plan."""
    core, sent, ends = EngineCore(LIMITS, policy, 3, 1000), [], []
    for number in range(requests):
        core.add(0, generate(range(number, number + 40), number, max_tokens=9))
    for _ in range(5000):
        sent += (latest := plans(core))
        for plan in latest:
            core.on_result(result_of(plan))
        ends += [finish.reason for finish in finishes(core)]
        if not core.has_requests:
            return ends, sent
    raise AssertionError("the engine makes no progress")


@pytest.mark.parametrize("fault", FAULTS)
def test_the_engine_serves_on_and_the_fault_is_logged_once(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "runahead.scheduler"):
        ends, plans = serve(GuardedPolicy(FAULTS[fault]))
    assert ends == [FinishReason.LENGTH] * 12
    assert len([record for record in caplog.records if "batching policy failed" in record.message]) == 1
    for plan in plans:
        slots, counts = unpack(plan.slots), unpack(plan.counts)
        assert len(set(slots.tolist())) == len(slots)
        assert counts.sum() <= LIMITS.max_num_batched_tokens
        if fault in ("begin raises", "budget 0", "no budget"):
            assert counts.sum() == 1, "one unit"


def test_numbers_of_numpy_are_numbers() -> None:
    policy = Faulty(
        lambda b: replace(b, tokens=np.uint64(b.tokens)), slice_=lambda *numbers: np.array(numbers, np.uint8)
    )
    assert serve(GuardedPolicy(policy)) == serve(ChunkedPolicy())


def test_a_policy_may_use_the_array_of_its_answer_again() -> None:
    """Steps in flight keep theirs."""
    array = np.zeros(LIMITS.num_slots, np.int64)

    def answer(rows: SlotIds) -> SlotIds:
        array[: len(rows)] = rows[::-1]
        return array[: len(rows)]

    expected = serve(GuardedPolicy(Faulty(rows=lambda rows: rows[::-1].copy())))
    assert serve(GuardedPolicy(Faulty(rows=answer))) == expected


SOUND = [ChunkedPolicy(), BalancedPolicy(), Faulty(budget=lambda b: replace(b, chunk=1 << 40))]


@pytest.mark.parametrize("policy", SOUND, ids=["chunked", "balanced", "no limit of a chunk"])
def test_a_sound_policy_is_not_touched(policy: BatchingPolicy, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "runahead.scheduler"):
        guarded, bare = serve(GuardedPolicy(policy)), serve(policy)
    assert guarded == bare
    assert not caplog.records


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_configured_policy_is_guarded_and_plans_as_the_bare_one(name: str) -> None:
    config = SchedulerConfig.model_validate(
        {"batching_policy": name, "max_num_batched_tokens": 64, "max_model_len": 128}
    )
    policy = make_policy(config, LIMITS)
    assert isinstance(policy, GuardedPolicy)
    assert serve(policy) == serve(BUILT_IN[name].from_config(config, LIMITS))


def test_the_threshold_for_long_prompts_holds_in_balanced_too() -> None:
    config = SchedulerConfig.model_validate({"batching_policy": "balanced", "long_prefill_token_threshold": 10})
    _, plans = serve(make_policy(config, LIMITS))
    assert max(int(unpack(plan.counts).max()) for plan in plans) == 10
