"""Constrained rows whose masks are late are left out on the vLLM backend, and hold back nobody."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest

from services.worker.batch.slots import EMPTY
from tests.simulation.grammar import structured
from tests.vllm.driver import VllmRun, VllmStream, VllmWorker
from tests.vllm.parameter_cases import DRAFTS, FEW_BLOCKS, GREEDY, SAMPLED, assert_all_equal, assert_equal, prompt_of
from tests.vllm.socket_driver import socket_run

PHRASE = prompt_of(1, 6)


def streams() -> list[VllmStream]:
    """Return constrained and other requests with all that a discarded sample could change."""
    scored = msgspec.structs.replace(GREEDY, logprobs=2, prompt_logprobs=1)
    warm = msgspec.structs.replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.9, logprobs=1)
    return [
        VllmStream(PHRASE * 9, scored),
        VllmStream(PHRASE * 5, scored, structured(1)),
        VllmStream(prompt_of(3), warm),
        VllmStream(prompt_of(4), warm, structured(2)),
        VllmStream(PHRASE * 20, msgspec.structs.replace(SAMPLED, seed=5, top_k=20), structured(3)),
        VllmStream(prompt_of(2), GREEDY, structured(6)),
        VllmStream(prompt_of(5), msgspec.structs.replace(SAMPLED, seed=6, min_p=0.1)),
        VllmStream(prompt_of(6), msgspec.structs.replace(SAMPLED, seed=7, min_tokens=9), structured(4)),
    ]


@pytest.fixture(scope="module")
def expected() -> list[VllmStream]:
    """Answers without drafts at depth one, whose masks are there in time."""
    worker = VllmWorker()
    with VllmRun(worker, 1, prefix_caching=False) as run:
        answers = run.serve(*streams())
        assert not run.core.store.counters["left_out_rows_total"]
    worker.runner.shutdown()
    return answers


@pytest.fixture(scope="module", params=[None, DRAFTS], ids=["without drafts", "ngram"])
def worker(expected: list[VllmStream], request: pytest.FixtureRequest) -> Iterator[VllmWorker]:
    """A process has one vLLM at a time."""
    worker = VllmWorker(request.param)
    yield worker
    worker.runner.shutdown()


@pytest.mark.parametrize(
    ("depth", "late", "num_blocks"),
    [
        (2, 1, 200),
        (3, 3, FEW_BLOCKS),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in ((2, 1, FEW_BLOCKS), (2, 2, 200), (2, 2, FEW_BLOCKS), (3, 3, 200))
        ),
    ],
)
def test_answers_are_those_of_depth_one(
    depth: int, late: int, num_blocks: int, worker: VllmWorker, expected: list[VllmStream]
) -> None:
    with VllmRun(worker, depth, num_blocks, late=late) as run:
        assert_all_equal(run.serve(*streams()), expected)
        assert run.core.store.counters["left_out_rows_total"] > 3
        assert num_blocks > FEW_BLOCKS or run.core.stats()["num_preemptions"] > 0
        assert worker.speculation is None or run.core.stats()["spec_decode_num_accepted_tokens"] > 0


def test_neighbours_end_while_masks_are_missing(worker: VllmWorker, expected: list[VllmStream]) -> None:
    """No mask is made until the other requests have all of their tokens."""
    with VllmRun(worker, 2, late=1) as run:
        served = [run.add(number, stream) for number, stream in enumerate(streams())]
        free = [stream for stream in served if stream.structured is None]
        while any(stream.finish is None for stream in free):
            run.dispatch()
            run.apply_result()
        assert [stream.tokens for stream in served if stream.structured is not None] == [[]] * 5
        run.finish()
    assert_all_equal(served, expected)


@pytest.mark.parametrize(("depth", "late"), [(2, 1), (3, 2)])
def test_messages_on_a_socket_are_read_while_a_step_waits(
    depth: int, late: int, worker: VllmWorker, expected: list[VllmStream], tmp_path: Path
) -> None:
    """Plans, masks and released slots arrive in any order while the worker's only thread waits or computes."""
    with socket_run(worker, tmp_path, depth, late) as run:
        served = [run.add(number, stream) for number, stream in enumerate(streams())]
        free, rng = [stream for stream in served if stream.structured is None], Random(late)
        while run.core.requests or run.core.queue:
            others_wait = any(stream.finish is None for stream in free)
            run.make_masks(not others_wait or rng.random() < 0.3)
            run.dispatch()
            if not run.masks.waiting or others_wait:
                run.apply_result()
        run.dispatch()
        run.wait_until_read()
        assert (worker.runner.table.generation == EMPTY).all()
        assert run.core.store.counters["left_out_rows_total"] > 3
    assert_all_equal(served, expected)


def test_a_request_that_is_alone_waits_for_its_masks(worker: VllmWorker, expected: list[VllmStream]) -> None:
    with VllmRun(worker, 5, late=1) as run:
        assert_equal(run.serve_one(0, streams()[1]), expected[1])
        assert run.core.store.counters["left_out_rows_total"] == 0


def test_every_row_of_a_step_is_left_out(worker: VllmWorker, expected: list[VllmStream]) -> None:
    """The second step has a constrained row alone, and the third one a row of another request."""
    with VllmRun(worker, 2, late=1) as run:
        constrained = run.add(0, streams()[1])
        run.dispatch()
        run.make_masks()
        run.dispatch()
        run.apply_result()
        other = run.add(1, streams()[0])
        run.dispatch()
        run.apply_result()
        assert run.core.store.counters["left_out_rows_total"] == 1
        run.finish()
    assert_equal(constrained, expected[1])
    assert_equal(other, expected[0])
