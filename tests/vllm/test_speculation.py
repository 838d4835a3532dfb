"""vLLM's n-gram drafts under the scheduler: all cells, and where rows of several tokens end. What holds for every
drafter is in test_drafters.py."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from protocol.codec import pack
from protocol.requests import FinishReason
from services.scheduler.capabilities import Combination, refusal, table
from tests.matrix import covering
from tests.vllm.driver import CONTEXT, VllmRun, VllmStream, VllmWorker
from tests.vllm.parameter_cases import (
    DRAFTS,
    GREEDY,
    PARAMETER_CASES,
    SAMPLED,
    all_streams,
    assert_all_equal,
    assert_equal,
    each_depth,
    prompt_of,
)

K = DRAFTS.num_speculative_tokens
PHRASE = prompt_of(1, 6)
REPEATED = PHRASE * 4
"""A prompt that repeats itself."""
ONLY = msgspec.structs.replace(SAMPLED, allowed_token_ids=pack([77]))
"""Parameters that allow one token, so every draft is right."""


class Plain(NamedTuple):
    """Answers without drafts, at depth one."""

    everything: dict[str, VllmStream]
    stopping: list[VllmStream]
    filling: list[VllmStream]
    """Requests that fill the context, and others."""


def filling() -> list[VllmStream]:
    """Return requests that fill the context, and others that do not."""
    length = CONTEXT - 16
    near = [VllmStream((PHRASE * 40)[:length], msgspec.structs.replace(GREEDY, max_tokens=16))]
    near.append(VllmStream(prompt_of(5, length), msgspec.structs.replace(ONLY, max_tokens=16)))
    return [*near, VllmStream(REPEATED, GREEDY), VllmStream(prompt_of(4), SAMPLED)]


def stopping() -> list[VllmStream]:
    """Return requests that sample their stop token at once, and must not stop before 0, 1, 2 ... tokens."""
    params = msgspec.structs.replace(ONLY, stop_token_ids=(77,))
    return [VllmStream(prompt_of(n), msgspec.structs.replace(params, min_tokens=n)) for n in range(2 * K + 3)]


@pytest.fixture(scope="module")
def plain() -> Plain:
    worker = VllmWorker()
    with VllmRun(worker, 1, prefix_caching=False) as run:
        answers = [run.serve(*streams) for streams in (all_streams(), stopping(), filling())]
    worker.runner.shutdown()
    return Plain(dict(zip(PARAMETER_CASES, answers[0], strict=True)), *answers[1:])


@pytest.fixture(scope="module")
def worker(plain: Plain) -> Iterator[VllmWorker]:
    """A process has one vLLM at a time."""
    worker = VllmWorker(DRAFTS)
    yield worker
    worker.runner.shutdown()


def accepted(run: VllmRun) -> int:
    return int(run.core.stats()["spec_decode_num_accepted_tokens"])


CELLS = {
    cell: reason for cell, reason in table() if cell.backend == "vllm" and not cell.structured and cell.speculation
}
"""Each cell is tested with structured output too; those with stages in test_ranks.py."""


@pytest.mark.parametrize(
    ("cell", "prefix_caching"),
    covering(
        [cell for cell, reason in CELLS.items() if reason is None and not cell.pipeline], [False, True], strength=1
    ),
)
def test_supported_cell_answers_as_without_drafts(
    cell: Combination, prefix_caching: bool, worker: VllmWorker, plain: Plain
) -> None:
    """With every parameter, greedy and sampled, grammars, log-probabilities, and prompts in chunks."""
    assert refusal(replace(cell, structured=True)) is None
    depth, policy = 1 + 2 * cell.runs_ahead, cell.batching_policy
    with VllmRun(worker, depth, prefix_caching=prefix_caching, policy=policy) as run:
        assert_all_equal(run.serve(*all_streams()), plain.everything.values())
        assert accepted(run) > 0
        assert run.core.stats()["num_preemptions"] == 0


def test_phases_are_refused_in_every_cell() -> None:
    for cell, reason in CELLS.items():
        assert (reason is not None) == (cell.batching_policy == "phased"), str(cell)


@each_depth
def test_drafts_that_are_right_save_steps_and_end_with_max_tokens(depth: int, worker: VllmWorker) -> None:
    """The row cut: tokens after the end are cut at any place of a row."""
    lengths = range(1, 2 * K + 4)
    with VllmRun(worker, depth) as run:
        params_of_lengths = [msgspec.structs.replace(ONLY, max_tokens=n) for n in lengths]
        for stream in run.serve(
            *(VllmStream(prompt_of(n), params) for n, params in zip(lengths, params_of_lengths, strict=True))
        ):
            assert stream.tokens == [77] * stream.params.max_tokens
            assert stream.finish.reason is FinishReason.LENGTH
        counts = run.counts
    assert max(counts) == K + 1, "row width"
    assert sum(counts) > sum(lengths), "some rows went beyond the end"


@each_depth
def test_stop_in_the_middle_of_a_row(depth: int, worker: VllmWorker, plain: Plain) -> None:
    with VllmRun(worker, depth) as run:
        assert_all_equal(run.serve(*stopping()), plain.stopping)
        assert accepted(run) > 0
        assert sum(run.counts) > sum(len(stream.tokens) for stream in plain.stopping)
    assert {len(stream.tokens) % (K + 1) for stream in plain.stopping} == set(range(K + 1))
    assert all(s.finish is not None and s.finish.reason is FinishReason.STOP for s in plain.stopping)


@each_depth
def test_drafts_end_with_the_context(depth: int, worker: VllmWorker, plain: Plain) -> None:
    """The position bound. Requests that are far from the end keep their drafts."""
    with VllmRun(worker, depth) as run:
        assert_all_equal(run.serve(*filling()), plain.filling)
        assert accepted(run) > K
    assert len(plain.filling[1].prompt) + len(plain.filling[1].tokens) == CONTEXT


@each_depth
def test_number_reused_while_drafts_of_the_first_request_are_in_flight(
    depth: int, worker: VllmWorker, plain: Plain
) -> None:
    with VllmRun(worker, depth) as run:
        long = run.add(9, VllmStream(prompt_of(3, 250), GREEDY))
        for turns in (2, 3, 5):
            first = run.add(1, VllmStream(REPEATED, msgspec.structs.replace(ONLY, max_tokens=100)))
            for _ in range(turns):
                run.run_step()
            run.dispatch()
            run.abort(1)
            assert first.aborted
            if 9 in run.streams and not long.tokens:
                run.abort(9)  # in the middle of its prompt
            assert_equal(run.serve_one(1, all_streams()[0]), plain.everything["greedy"])
        assert long.aborted


def test_the_compiled_drafter_is_stored_for_the_next_start(worker: VllmWorker) -> None:
    with VllmRun(worker, 1):
        stats = sys.modules["vllm.v1.spec_decode.ngram_proposer"].batch_propose_numba.stats
    assert stats.cache_hits or stats.cache_misses


def test_no_drafts_beyond_the_limit_of_the_drafter(worker: VllmWorker) -> None:
    """The drafter limit. The weights are read again, because vLLM takes the limit when it starts. The last test with
    weights."""
    limit = 48
    worker.speculation = msgspec.structs.replace(DRAFTS, num_speculative_tokens=5, max_model_len=limit)
    with VllmRun(worker, 2) as run:
        [stream] = run.serve(VllmStream(prompt_of(1, 20), msgspec.structs.replace(ONLY, max_tokens=60)))
    assert stream.tokens == [77] * 60
    ends = (20 + np.cumsum(stream.rows)).tolist()
    drafted = [count for end, count in zip(ends, stream.rows, strict=True) if end <= limit]
    assert max(drafted) == 6
    assert stream.rows[len(drafted) + 1 :] == [1] * (60 + 20 - ends[len(drafted)])
