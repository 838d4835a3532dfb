"""Constrained rows whose masks are late are left out on the native backend, and hold back nobody."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from protocol.kv_groups import ONE_GROUP
from protocol.membership import Assignment, InitializeCache, Speculation
from protocol.sampling import SamplingParams
from services.checkpoint import DEMO_MODEL
from services.config import WorkerConfig
from services.scheduler.core.limits import Limits
from tests.integration.native.conftest import Family
from tests.integration.native.driver import GarblingRunner
from tests.integration.native.engine_driver import EngineDriver, LocalSteps, ServedRequest
from tests.matrix import covering
from tests.simulation.answers import PositionScore
from tests.simulation.grammar import structured

ROOMY, SCARCE = 96, 22
"""Blocks; with the few, requests are preempted."""
DRAFTS = 3
NGRAM = Speculation("ngram", DRAFTS, prompt_lookup_min=1, prompt_lookup_max=3)
EAGLE = Speculation("eagle", DRAFTS)
PROMPT = [5, 9, 31, 5, 9, 31, 5, 9, 31, 5, 9, 44, 7, 5, 9, 31, 5]
WARM = {"max_tokens": 14, "temperature": 0.9}


class ServedAnswers(NamedTuple):
    answers: list[list[int]]
    scores: list[dict[int, PositionScore]]
    counters: Counter[str]


def limits(num_blocks: int, depth: int, speculation: Speculation | None, stages: int = 1) -> Limits:
    drafts = 0 if speculation is None else speculation.num_speculative_tokens
    return Limits(
        max_num_seqs=5,
        max_num_batched_tokens=24,
        max_model_len=64,
        num_blocks=num_blocks,
        block_size=4,
        stages=stages,
        lookahead=drafts if speculation == EAGLE else 0,
        drafts_in_flight=drafts * depth,
        leaves_rows_out=True,
    )


def requests() -> list[ServedRequest]:
    """Return constrained and other requests, greedy and sampled, with penalties and log-probabilities."""
    greedy, scored = SamplingParams(14, 0.0), SamplingParams(14, 0.0, logprobs=2)
    return [
        ServedRequest(PROMPT, scored),
        ServedRequest(PROMPT[3:], scored, structured(1)),
        ServedRequest(PROMPT[5:], SamplingParams(**WARM, seed=4, presence_penalty=0.9, repetition_penalty=1.3)),
        ServedRequest(PROMPT[1:9], SamplingParams(**WARM, seed=5, top_k=20), structured(2)),
        ServedRequest(PROMPT * 2, SamplingParams(**WARM, seed=6, frequency_penalty=0.5), structured(3)),
        ServedRequest(PROMPT[2:], greedy, structured(6)),
        ServedRequest(PROMPT[4:], SamplingParams(**WARM, seed=7)),
    ]


def serve(
    path: Path,
    depth: int,
    late: int,
    speculation: Speculation | None = None,
    num_blocks: int = 96,
    served: list[ServedRequest] | None = None,
    max_kv_groups: int = 1,
) -> ServedAnswers:
    """Serve the requests, by default all of `requests`, with a runner of their own."""
    size, served = limits(num_blocks, depth, speculation), requests() if served is None else served
    config = WorkerConfig(model=str(path), threads=1, dtype="float32")
    runner = GarblingRunner(config)
    sizes = size.block_size, size.num_slots, size.max_num_batched_tokens, size.max_model_len
    assignment = Assignment(1, 0, 1, *sizes, speculation=speculation, max_kv_groups=max_kv_groups)
    loaded = runner.load(assignment, lambda phase, fraction: None)
    size = replace(size, groups=loaded.groups or ONE_GROUP)
    runner.init_kv_cache(InitializeCache(size.num_blocks, size.max_model_len))
    drafts = 0 if speculation is None else speculation.num_speculative_tokens
    driver = EngineDriver(LocalSteps(runner), size, loaded.vocab_size, depth, late, drafts)
    answers = driver.serve(served)
    runner.shutdown()
    return ServedAnswers(answers, [request.scores for request in served], driver.core.store.counters)


def assert_equal(served: ServedAnswers, wanted: ServedAnswers) -> None:
    """Raises: AssertionError, if tokens or log-probabilities differ."""
    assert served.answers == wanted.answers
    for scores, others in zip(served.scores, wanted.scores, strict=True):
        assert scores.keys() == others.keys()
        for position, row in scores.items():
            assert row.ids == others[position].ids
            assert row.values == pytest.approx(others[position].values, abs=1e-4)


@pytest.fixture(scope="module")
def wanted(make_family: Callable[[str], Family]) -> ServedAnswers:
    """At depth one."""
    return serve(make_family("llama-tied").path, 1, 0)


@pytest.mark.parametrize(("speculation", "num_blocks"), covering([None, NGRAM], [ROOMY, SCARCE], strength=1))
def test_answers_are_those_of_depth_one(
    make_family: Callable[[str], Family], wanted: ServedAnswers, speculation: Speculation | None, num_blocks: int
) -> None:
    path = make_family("llama-tied").path
    assert [len(tokens) for tokens in wanted.answers] == [14] * 7
    assert [len(scores) for scores in wanted.scores] == [14, 14, 0, 0, 0, 0, 0]
    for depth, late in ((2, 1), (3, 3)):
        served = serve(path, depth, late, speculation, num_blocks)
        assert_equal(served, wanted)
        assert served.counters["left_out_rows_total"] > 3
        assert num_blocks == ROOMY or served.counters["num_preemptions"] > 0
        assert speculation is None or served.counters["spec_decode_num_accepted_tokens"] > 0


@pytest.mark.parametrize("speculation", [None, NGRAM], ids=["without drafts", "ngram"])
def test_every_row_of_a_step_is_left_out(make_family: Callable[[str], Family], speculation: Speculation | None) -> None:
    """At a depth of more steps than can be prepared, a request that is alone does not block the main thread."""
    path = make_family("llama-tied").path
    wanted = serve(path, 1, 0, served=requests()[1:2])
    served = serve(path, 5, 1, speculation, served=requests()[1:2])
    assert_equal(served, wanted)
    assert served.counters["left_out_rows_total"] > 0


def test_answers_with_an_eagle_head_are_those_of_depth_one() -> None:
    """The head's own keys and values follow the rows that were left out."""
    wanted, served = serve(DEMO_MODEL, 1, 0), serve(DEMO_MODEL, 2, 1, EAGLE)
    assert_equal(served, wanted)
    assert served.counters["left_out_rows_total"] > 3
    assert served.counters["spec_decode_num_draft_tokens"] > 0
