"""vLLM's drafts under the scheduler: answers are those without drafts, at any depth (spec S2-1)."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from protocol.codec import pack
from protocol.membership import Assignment, Speculation
from protocol.requests import FinishReason
from services.config import WorkerConfig
from services.scheduler.capabilities import Combination, refusal, table
from services.worker.backends.vllm import VllmRunner
from services.worker.runner import LoadError
from tests.vllm.asked import ASKED, DEPTHS, DRAWN, FEW, GREEDY, assert_equal, everything, text
from tests.vllm.driver import BLOCK, CHUNK, CONTEXT, MAX_SEQS, Run, Stream, Worker

K = 3
DRAFTS = Speculation("ngram", K, prompt_lookup_min=1, prompt_lookup_max=3)
PHRASE = text(1, 6)
REPEATED = PHRASE * 4
"""A prompt whose end was there before."""
ONLY = msgspec.structs.replace(DRAWN, allowed_token_ids=pack([77]))
"""Says one token for ever, so that every draft is right."""


class Plain(NamedTuple):
    """Answers without drafts, one step at a time."""

    everything: dict[str, Stream]
    stopping: list[Stream]
    to_the_end: list[Stream]
    """Of the context."""


def to_the_end() -> list[Stream]:
    """Requests that fill the context, and others beside them that are far from its end."""
    length = CONTEXT - 16
    near = [Stream((PHRASE * 40)[:length], msgspec.structs.replace(GREEDY, max_tokens=16))]
    near.append(Stream(text(5, length), msgspec.structs.replace(ONLY, max_tokens=16)))
    return [*near, Stream(REPEATED, GREEDY), Stream(text(4), DRAWN)]


def stopping() -> list[Stream]:
    """Requests that say their stop token for ever, and stop once they may: one token later each."""
    params = msgspec.structs.replace(ONLY, stop_token_ids=(77,))
    return [Stream(text(n), msgspec.structs.replace(params, min_tokens=n)) for n in range(2 * K + 3)]


@pytest.fixture(scope="module")
def plain() -> Plain:
    worker = Worker()
    with Run(worker, 1, prefix_caching=False) as run:
        answers = [run.serve(*streams) for streams in (everything(), stopping(), to_the_end())]
    worker.runner.shutdown()
    return Plain(dict(zip(ASKED, answers[0], strict=True)), *answers[1:])


@pytest.fixture(scope="module")
def worker(plain: Plain) -> Iterator[Worker]:
    """There is one vLLM in a process at a time."""
    worker = Worker(DRAFTS)
    yield worker
    worker.runner.shutdown()


def accepted(run: Run) -> int:
    return int(run.core.stats()["spec_decode_num_accepted_tokens"])


CELLS = {
    cell: reason
    for cell, reason in table()
    if cell.backend == "vllm" and not cell.structured and cell.speculation
}
"""Structured output is among what is asked for in each."""


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("cell", [cell for cell, reason in CELLS.items() if reason is None], ids=str)
def test_cell_that_is_not_refused_answers_as_without_drafts(
    cell: Combination, prefix_caching: bool, worker: Worker, plain: Plain
) -> None:
    """Every parameter, greedy and drawn, with a grammar, log-probabilities, and prompts in chunks."""
    assert refusal(replace(cell, structured=True)) is None
    depth, policy = 1 + 2 * cell.runs_ahead, cell.batching_policy
    with Run(worker, depth, prefix_caching=prefix_caching, policy=policy) as run:
        for got, expected in zip(run.serve(*everything()), plain.everything.values(), strict=True):
            assert_equal(got, expected)
        assert accepted(run) > 0
        assert run.core.stats()["num_preemptions"] == 0


def test_stages_and_phases_are_refused_in_every_cell() -> None:
    for cell, reason in CELLS.items():
        assert (reason is not None) == (cell.pipeline or cell.batching_policy == "phased"), str(cell)


@pytest.mark.parametrize("depth", DEPTHS)
def test_preemption_storm_changes_no_answer(depth: int, worker: Worker, plain: Plain) -> None:
    """A request that comes back has no drafts left of before (S2-6), and its noise is where its tokens are."""
    with Run(worker, depth, num_blocks=FEW) as run:
        for got, expected in zip(run.serve(*everything()), plain.everything.values(), strict=True):
            assert_equal(got, expected)
        assert run.core.stats()["num_preemptions"] >= 3
        assert accepted(run) > 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_drafts_that_are_right_save_steps_and_end_with_max_tokens(depth: int, worker: Worker) -> None:
    """Spec 2(b) 12: what a row has beyond the end is cut, wherever in the row that is."""
    lengths = range(1, 2 * K + 4)
    with Run(worker, depth) as run:
        asked = [msgspec.structs.replace(ONLY, max_tokens=n) for n in lengths]
        for stream in run.serve(*(Stream(text(n), params) for n, params in zip(lengths, asked, strict=True))):
            assert stream.tokens == [77] * stream.params.max_tokens
            assert stream.finish is not None
            assert stream.finish.reason is FinishReason.LENGTH
        counts = run.counts
    assert max(counts) == K + 1, "no row holds more than its drafts and one (S2-3)"
    assert sum(counts) > sum(lengths), "rows that went beyond the end"


@pytest.mark.parametrize("depth", DEPTHS)
def test_stop_in_the_middle_of_a_row(depth: int, worker: Worker, plain: Plain) -> None:
    with Run(worker, depth) as run:
        for got, expected in zip(run.serve(*stopping()), plain.stopping, strict=True):
            assert_equal(got, expected)
        assert accepted(run) > 0
        assert sum(run.counts) > sum(len(stream.tokens) for stream in plain.stopping)
    assert {len(stream.tokens) % (K + 1) for stream in plain.stopping} == set(range(K + 1))
    assert all(s.finish is not None and s.finish.reason is FinishReason.STOP for s in plain.stopping)


@pytest.mark.parametrize("depth", DEPTHS)
def test_drafts_end_with_the_context(depth: int, worker: Worker, plain: Plain) -> None:
    """Spec S2-5; and requests far from its end keep theirs."""
    with Run(worker, depth) as run:
        for got, expected in zip(run.serve(*to_the_end()), plain.to_the_end, strict=True):
            assert_equal(got, expected)
        assert accepted(run) > K
    assert len(plain.to_the_end[1].prompt) + len(plain.to_the_end[1].tokens) == CONTEXT


@pytest.mark.parametrize("depth", DEPTHS)
def test_number_used_again_while_drafts_of_the_first_are_in_flight(
    depth: int, worker: Worker, plain: Plain
) -> None:
    with Run(worker, depth) as run:
        long = run.add(9, Stream(text(3, 250), GREEDY))
        for turns in (2, 3, 5):
            first = run.add(1, Stream(REPEATED, msgspec.structs.replace(ONLY, max_tokens=100)))
            for _ in range(turns):
                run.turn()
            run.dispatch()
            run.abort(1)
            assert first.aborted
            if 9 in run.streams and not long.tokens:
                run.abort(9)  # in the middle of its prompt
            assert_equal(run.serve_one(1, everything()[0]), plain.everything["greedy"])
        assert long.aborted


def test_more_requests_than_slots_reuse_them(worker: Worker) -> None:
    def streams() -> list[Stream]:
        return [Stream((text(n, 3 + n % 4) * 8)[:40], DRAWN if n % 2 else ONLY) for n in range(3 * MAX_SEQS)]

    with Run(worker, 1) as run:
        expected = [stream.tokens for stream in run.serve(*streams())]
    with Run(worker, 3) as run:
        assert [stream.tokens for stream in run.serve(*streams())] == expected
        assert accepted(run) > 0


@pytest.mark.parametrize("name", ["drawn", "repetition_penalty", "min_tokens", "grammar, drawn, penalties"])
def test_request_goes_on_in_the_next_epoch(name: str, worker: Worker, plain: Plain) -> None:
    """Others know nothing of it but its tokens, and not how many drafts they took."""
    stream, expected = everything()[list(ASKED).index(name)], plain.everything[name]
    stream.tokens = expected.tokens[:10]
    with Run(worker, 2) as run:
        assert run.serve_one(0, stream).tokens == expected.tokens


def test_rows_are_as_long_at_any_depth(worker: Worker) -> None:
    """Spec S2-2: as many drafts of each request are accepted, step by step."""
    rows = []
    for depth in DEPTHS:
        with Run(worker, depth) as run:
            streams = run.serve(*everything(), Stream(REPEATED, GREEDY))
        rows.append([stream.rows for stream in streams])
    assert rows[0] == rows[1] == rows[2]
    assert max(map(max, rows[0])) == K + 1


class Varying:
    """A `Drafting`: another number of drafts in each step, and none now and then."""

    least_chance = 0.0

    def __init__(self) -> None:
        self._numbers = cycle((K, 0, 1, 2))

    def length(self, num_rows: int) -> int:
        return next(self._numbers)

    def observe(self, *step: object) -> None:
        """Nothing it sees changes it."""


@pytest.mark.parametrize("depth", DEPTHS)
def test_number_of_drafts_may_change_with_every_step(depth: int, worker: Worker, plain: Plain) -> None:
    with Run(worker, depth, drafting=Varying()) as run:
        for got, expected in zip(run.serve(*everything()), plain.everything.values(), strict=True):
            assert_equal(got, expected)
        assert accepted(run) > 0


def test_no_drafts_beyond_what_the_drafter_was_told(worker: Worker) -> None:
    """The weights are read once more: vLLM is told when it begins. The last test that needs them."""
    limit = 48
    worker.speculation = msgspec.structs.replace(DRAFTS, num_speculative_tokens=5, max_model_len=limit)
    with Run(worker, 2) as run:
        [stream] = run.serve(Stream(text(1, 20), msgspec.structs.replace(ONLY, max_tokens=60)))
    assert stream.tokens == [77] * 60
    ends = (20 + np.cumsum(stream.rows)).tolist()
    drafted = [count for end, count in zip(ends, stream.rows, strict=True) if end <= limit]
    assert max(drafted) == 6
    assert stream.rows[len(drafted) + 1 :] == [1] * (60 + 20 - ends[len(drafted)])


@pytest.mark.parametrize("method", ["eagle", "eagle3", "draft_model"])
def test_other_drafters_are_refused_by_name(method: str) -> None:
    runner = VllmRunner(WorkerConfig(backend="vllm"))
    assignment = Assignment(1, 0, 1, BLOCK, 8, CHUNK, speculation=Speculation(method, 2, "some/head"))
    with pytest.raises(LoadError, match=f'only "ngram" is driven so far: "method": "{method}"'):
        runner.load(assignment, lambda phase, fraction: None)
