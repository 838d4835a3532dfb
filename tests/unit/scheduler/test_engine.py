"""Admission and bookkeeping of requests: a request that cannot be served ends alone."""

from typing import Any

import pytest

from protocol.codec import ProtocolError, pack, unpack
from protocol.requests import MAX_PRIORITY, FinishReason, GenerateRequest
from protocol.sampling import Pooling, StructuredOutputParams
from services.scheduler.core import plan
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.policies import ChunkedPolicy
from tests.simulation.grammar import Compilation, structured
from tests.simulation.requests import finishes, generate, plans
from tests.simulation.results import result_of

LIMITS = Limits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=32, num_blocks=6, block_size=4)


def engine(**options: Any) -> EngineCore:
    return EngineCore(LIMITS, ChunkedPolicy(), depth=2, vocab_size=50, **options)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (generate([]), "the prompt is empty"),
        (generate([1, 2], prompt=3), "the prompt is empty"),
        (generate([1, 50]), "between 0 and 49"),
        (generate([1, -1]), "between 0 and 49"),
        (generate([1] * 32), "32 tokens, but the context holds at most 31"),
        (generate([1] * 21, max_tokens=5), "needs 25 tokens of KV cache, but it holds 24"),
        (generate([1, 2, 3], prompt=1, max_tokens=2), "already delivered"),
        (generate([1] * 20, prompt=5, max_tokens=2**31 - 1), "needs 31 tokens"),
        (generate([1], stop_token_ids=(3, 50)), "stop_token_ids must lie between 0 and 49"),
        (generate([1], min_tokens=2**31 - 1), "the context holds 32 tokens"),
        (generate([1], priority=MAX_PRIORITY + 1), "priority must lie between"),
        (generate(structured=structured(1)), "without the model's tokenizer"),
        (generate(pooling=Pooling.MEAN, max_tokens=1), "serves no embeddings"),
        (generate(logit_bias=((50, 1.0),)), "between 0 and 49"),
        (generate(bad_words=((1, 50),)), "between 0 and 49"),
        (generate(allowed_token_ids=pack([1, 50])), "between 0 and 49"),
        (generate(allowed_token_ids=pack([-1])), "between 0 and 49"),
    ],
)
def test_a_request_that_cannot_be_served_ends_alone(message: GenerateRequest, says: str) -> None:
    core = engine()
    core.add(0, generate([1, 2], number=9))
    core.add(0, message)
    (finish,) = finishes(core)
    assert (finish.number, finish.reason) == (message.number, FinishReason.INVALID)
    assert says in finish.message
    assert finish.by_settings == any(text in says for text in ("KV cache", "delivered", "needs", "without", "serves"))
    assert [key[1] for key in core.requests] == [9]
    assert len(list(core.dispatch())) == 2, "the other one is served"


@pytest.mark.parametrize("grammar", [None, structured(1)])
def test_bounded_queues_reject_and_say_so(grammar: StructuredOutputParams | None) -> None:
    """Requests whose grammar is compiled count, too."""
    core = engine(max_num_queued_reqs=2, max_num_queued_tokens=100, compiler=Compilation(50))
    for number in range(3):
        core.add(0, generate([1], number=number, structured=grammar))
    assert [(f.number, f.reason) for f in finishes(core)] == [(2, FinishReason.REJECTED)]
    assert core.stats()["admission_rejections:max_num_queued_reqs"] == 1
    core = engine(max_num_queued_tokens=10, compiler=Compilation(50))
    core.add(0, generate([1] * 8, number=0, structured=grammar))
    core.add(0, generate([1] * 3, number=1))
    core.add(0, generate([1] * 2, number=2))
    assert [(f.number, f.reason) for f in finishes(core)] == [(1, FinishReason.REJECTED)]
    assert core.stats()["admission_rejections:max_num_queued_tokens"] == 1


def test_an_open_number_cannot_be_used_twice_but_frontends_do_not_share_numbers() -> None:
    core = engine()
    core.add(0, generate([1]))
    core.add(1, generate([1]))
    with pytest.raises(ProtocolError, match="frontend 0 reused number 0"):
        core.add(0, generate([2]))
    core.abort(0, [0])
    core.add(0, generate([2]))
    assert set(core.requests) == {(0, 0), (1, 0)}


def test_publishing_a_refusal_does_not_close_an_open_request_of_the_same_number() -> None:
    """The number is refused first, and accepted before the refusal was published."""
    core = engine()
    core.add(0, generate([]))
    core.add(0, generate([1]))
    assert [finish.reason for finish in finishes(core)] == [FinishReason.INVALID]
    core.abort(0, [0])
    assert not core.has_requests


def test_stats_name_what_runs_and_waits() -> None:
    core = engine()
    for number in range(3):
        core.add(0, generate([number] * 5, number=number))
    list(core.dispatch())
    stats = core.stats()
    assert (stats["num_requests_running"], stats["num_requests_waiting"]) == (2, 1)
    assert stats["inflight_steps"] == 2
    assert stats["kv_cache_usage_perc"] == pytest.approx(4 / 6)


def test_tokens_that_were_computed_for_nothing_are_counted_by_their_cause() -> None:
    core = engine()
    core.add(0, generate([1, 2], number=0, eos_token_ids=(7,)))
    core.add(0, generate([1, 2, 3], number=1))
    first, second = plans(core)
    core.on_result(result_of(first, (7, 5)))
    assert core.stats()["wasted_tokens_total:ignored_row"] == 0
    core.on_result(result_of(second, (8, 6)))
    assert core.stats()["wasted_tokens_total:ignored_row"] == 1, "the row behind the stop token"
    assert core.stats()["iteration_tokens_sum"] == 2 + 3 + 1 + 1
    assert [len(unpack(plan.slots)) for plan in plans(core)] == [1, 1]
    core.end_epoch()
    assert core.stats()["wasted_tokens_total:lost_epoch"] == 2
    assert core.stats()["wasted_tokens_total:ignored_row"] == 1


@pytest.mark.parametrize(("most", "entered"), [(1, [1, 1]), (50, [1, 1]), (10_000, [2])])
def test_requests_too_large_for_one_message_enter_one_after_the_other(
    most: int, entered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MAX_NEW_BYTES", most)
    core = engine()
    for number in range(2):
        core.add(0, generate([1, 2], number=number, bad_words=((3,) * 40,)))
    assert [len(step.new) for step in plans(core) if step.new] == entered
