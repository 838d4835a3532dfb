"""Rows with drafts in the core alone: what is refused and counted."""

import numpy as np
import pytest

from protocol.codec import pack, unpack
from protocol.requests import Finish
from services.scheduler.core.drafting import FixedDrafting
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.core.results import UnknownResult
from services.scheduler.policies import ChunkedPolicy
from tests.simulation.requests import generate, plans
from tests.simulation.results import result_of

K, EOS = 3, 49
LIMITS = Limits(
    max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32, num_blocks=32, block_size=4, drafts_in_flight=K
)


class ScriptedCore:
    """A core whose results the test provides, one token list per sampling row."""

    def __init__(self, max_tokens: int = 20) -> None:
        self.core = EngineCore(LIMITS, ChunkedPolicy(), 1, vocab_size=50, drafting=FixedDrafting(K))
        self.core.add(0, generate([1] * 4, 0, max_tokens=max_tokens, eos_token_ids=(EOS,)))
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finish] = {}

    def answer(self, *rows: list[int], more: int = 0) -> None:
        """Dispatch a step, and apply its result. `more`: drafts of each row that the plan has not."""
        (plan,) = plans(self.core)
        chosen = np.frombuffer(plan.samples, np.bool_)
        drafted = pack(unpack(plan.drafts)[chosen] + np.int32(more)) if plan.drafts else b""
        tokens = pack([token for row in rows for token in row])
        self.core.on_result(result_of(plan, counts=pack([*map(len, rows)]), token_ids=tokens, drafted=drafted))
        for _, outputs in self.core.take_outputs():
            for number, token in zip(unpack(outputs.numbers), unpack(outputs.token_ids), strict=True):
                self.tokens.setdefault(int(number), []).append(int(token))
            self.finished |= {finish.number: finish for finish in outputs.finished}


@pytest.mark.parametrize("row", [[], [5, 6, 7, 8, 9]])
def test_a_row_with_other_tokens_than_drafts_and_one_is_refused(row: list[int]) -> None:
    """Row width."""
    driver = ScriptedCore()
    driver.answer([5])
    with pytest.raises(UnknownResult, match="token"):
        driver.answer(row)
    assert driver.tokens[0] == [5]


def test_a_row_with_more_drafts_than_planned_is_refused() -> None:
    driver = ScriptedCore()
    driver.answer([5])
    with pytest.raises(UnknownResult, match="drafts"):
        driver.answer([6], more=1)


def test_drafts_are_counted_per_request_and_in_all() -> None:
    driver = ScriptedCore(max_tokens=6)
    driver.answer([5])
    driver.answer([6, 7])
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
