"""Rows with drafts in the core alone, step by step: placeholders, settling, cutting."""

import numpy as np
import pytest

from protocol.codec import pack, unpack
from protocol.requests import Finish
from protocol.steps import SchedulerOutput
from services.scheduler.core.drafting import FixedDrafting
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.core.results import UnknownResult
from services.scheduler.policies import BatchingPolicy, ChunkedPolicy
from tests.simulation.requests import generate, plans
from tests.simulation.results import result_of

K, EOS = 3, 49
LIMITS = Limits(
    max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32, num_blocks=32, block_size=4, drafts_in_flight=K
)


class ScriptedCore:
    """A core whose results the test provides, one token list per sampling row."""

    def __init__(self, depth: int = 1, limits: Limits = LIMITS, policy: BatchingPolicy | None = None) -> None:
        self.core = EngineCore(limits, policy or ChunkedPolicy(), depth, vocab_size=50, drafting=FixedDrafting(K))
        self.plans: list[SchedulerOutput] = []
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finish] = {}

    def generate(self, number: int = 0, prompt: int = 4, **params: object) -> None:
        params = {"max_tokens": 20, "eos_token_ids": (EOS,)} | params
        self.core.add(0, generate([1] * prompt, number, **params))

    def dispatch(self) -> SchedulerOutput:
        (plan,) = plans(self.core)
        self.plans.append(plan)
        return plan

    def answer(self, *rows: list[int]) -> None:
        plan = self.plans.pop(0)
        chosen = np.frombuffer(plan.samples, np.bool_)
        drafted = pack(unpack(plan.drafts)[chosen]) if plan.drafts else b""
        tokens = pack([token for row in rows for token in row])
        self.core.on_result(result_of(plan, counts=pack([*map(len, rows)]), token_ids=tokens, drafted=drafted))
        for _, outputs in self.core.take_outputs():
            for number, token in zip(unpack(outputs.numbers), unpack(outputs.token_ids), strict=True):
                self.tokens.setdefault(int(number), []).append(int(token))
            self.finished |= {finish.number: finish for finish in outputs.finished}


def starts_and_counts(plan: SchedulerOutput) -> list[tuple[int, int, int]]:
    drafts = unpack(plan.drafts or bytes(len(plan.counts)))
    return list(zip(unpack(plan.starts).tolist(), unpack(plan.counts).tolist(), drafts.tolist(), strict=True))


def test_a_row_promises_its_drafts_and_gives_back_what_was_rejected() -> None:
    """At depth one: `P = T + H - 1`, and P falls by the rejected drafts."""
    driver = ScriptedCore()
    driver.generate()
    plan = driver.dispatch()
    assert starts_and_counts(plan) == [(0, 4, 0)]
    assert plan.num_speculative_tokens == K
    driver.answer([5])
    assert starts_and_counts(driver.dispatch()) == [(4, 1 + K, K)]
    driver.answer([6, 7])  # one draft accepted, two rejected
    assert starts_and_counts(driver.dispatch()) == [(6, 1 + K, K)]
    driver.answer([8, 9, 10, 11])
    assert starts_and_counts(driver.dispatch()) == [(10, 1 + K, K)]
    assert driver.tokens[0] == [5, 6, 7, 8, 9, 10, 11]


def test_ahead_the_start_is_an_upper_bound() -> None:
    """At depth two the next row starts as if every draft were accepted; the result corrects later rows."""
    driver = ScriptedCore(depth=2)
    driver.generate()
    driver.plans += driver.core.dispatch()
    assert [starts_and_counts(plan) for plan in driver.plans] == [[(0, 4, 0)], [(4, 4, 3)]]
    driver.answer([5])
    assert starts_and_counts(driver.dispatch()) == [(8, 4, 3)]
    driver.answer([6])  # all three rejected
    assert starts_and_counts(driver.dispatch()) == [(9, 4, 3)]
    s = driver.core.epoch.slots
    assert int(s.computed[0]) == int(s.tokens[0] + s.placeholders[0]) - 1


@pytest.mark.parametrize("row", [[], [5, 6, 7, 8, 9]])
def test_a_row_with_other_tokens_than_drafts_and_one_is_refused(row: list[int]) -> None:
    """Row width."""
    driver = ScriptedCore()
    driver.generate()
    driver.dispatch()
    driver.answer([5])
    driver.dispatch()
    with pytest.raises(UnknownResult, match="token"):
        driver.answer(row)
    assert driver.tokens[0] == [5]


def test_drafts_are_counted_per_request_and_in_all() -> None:
    driver = ScriptedCore()
    driver.generate(max_tokens=6)
    driver.dispatch()
    driver.answer([5])
    driver.dispatch()
    driver.answer([6, 7])
    driver.dispatch()
    driver.answer([8, 9, 10, 11])
    assert driver.tokens[0] == [5, 6, 7, 8, 9, 10]
    finish = driver.finished[0]
    assert (finish.num_draft_tokens, finish.num_accepted_tokens) == (6, 4)
    stats = driver.core.stats()
    assert stats["spec_decode_num_drafts"] == 2
    assert stats["spec_decode_num_draft_tokens"] == 6
    assert stats["spec_decode_num_accepted_tokens"] == 4
    assert stats["wasted_tokens_total:rejected_draft"] == 2
    per_position = [stats[f"spec_decode_num_accepted_tokens_per_pos:{position}"] for position in range(K)]
    assert per_position == [2, 1, 1]
