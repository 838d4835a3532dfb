"""Models with recurrent states: rows that are left out, workers that are killed, and what is refused."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import msgspec
import pytest

from services.worker.backends.vllm.recurrent_states import RecurrentStates
from services.worker.runner import LoadError
from tests.e2e.server import wait_until
from tests.simulation.grammar import structured
from tests.vllm import checkpoints
from tests.vllm.driver import VllmRun, VllmStream, VllmWorker
from tests.vllm.parameter_cases import GREEDY, SAMPLED, assert_all_equal, prompt_of
from tests.vllm.preloaded import processes, serving_preloaded
from tests.vllm.reference import VllmRequest, generate

FEW_BLOCKS = 18
OUTPUT = 160
"""Tokens that take long enough for a worker to be killed within them."""
GREEDY_160 = {"temperature": 0.0, "max_tokens": OUTPUT, "ignore_eos": True}
PROMPTS = [prompt_of(number, 20 + 30 * number) for number in range(3)]


def streams() -> list[VllmStream]:
    """Return constrained and other requests, with prompts of one token, of one chunk and of several."""
    return [
        VllmStream(prompt_of(7), GREEDY),
        VllmStream(prompt_of(3, 1), GREEDY, structured(1)),
        VllmStream(prompt_of(3, 64), SAMPLED, structured(2)),
        VllmStream(prompt_of(4, 130), GREEDY, structured(3)),
        VllmStream(prompt_of(5, 65), SAMPLED, structured(4)),
        VllmStream(prompt_of(6), SAMPLED),
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("granite-hybrid", tmp_path_factory.mktemp("hybrid") / "model")


@pytest.fixture(scope="module")
def worker(model: Path) -> Iterator[VllmWorker]:
    worker = VllmWorker(model=str(model))
    yield worker
    worker.runner.shutdown()


@pytest.fixture(scope="module")
def expected(worker: VllmWorker) -> list[VllmStream]:
    """Answers at depth one, whose masks are there in time."""
    with VllmRun(worker, 1) as run:
        answers = run.serve(*streams())
        assert not run.core.store.counters["left_out_rows_total"]
    return answers


@pytest.mark.parametrize(
    ("depth", "late", "num_blocks"),
    [
        (2, 1, 200),
        (3, 3, FEW_BLOCKS),
        pytest.param(2, 1, FEW_BLOCKS, marks=pytest.mark.soak),
        pytest.param(3, 3, 200, marks=pytest.mark.soak),
    ],
)
def test_left_out_rows_change_no_token(
    depth: int, late: int, num_blocks: int, worker: VllmWorker, expected: list[VllmStream]
) -> None:
    with VllmRun(worker, depth, num_blocks, late=late) as run:
        assert_all_equal(run.serve(*streams()), expected)
        assert run.core.store.counters["left_out_rows_total"] > 3
        assert num_blocks > FEW_BLOCKS or run.core.stats()["num_preemptions"] > 0


def test_a_state_that_is_not_taken_back_changes_tokens(
    worker: VllmWorker, expected: list[VllmStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecurrentStates, "take_back", lambda self, rows: None)
    with VllmRun(worker, 2, late=1) as run:
        differ = [got.tokens != wanted.tokens for got, wanted in zip(run.serve(*streams()), expected, strict=True)]
    assert any(differ)
    assert not differ[0]


def test_request_continues_in_the_next_epoch(worker: VllmWorker, expected: list[VllmStream]) -> None:
    """Its state is computed again from its tokens, also while masks are late."""
    given = streams()
    for stream, wanted in zip(given, expected, strict=True):
        stream.tokens = wanted.tokens[:10]
    with VllmRun(worker, 2, late=1) as run:
        for got, wanted in zip(run.serve(*given), expected, strict=True):
            assert got.tokens == wanted.tokens


@pytest.mark.soak
def test_streams_go_on_when_their_worker_is_killed(model: Path) -> None:
    with processes() as pool:
        alone = [[VllmRequest(prompt, GREEDY_160)] for prompt in PROMPTS]
        settings = {"max_model_len": 256, "enable_prefix_caching": False}
        expected = [batch[0] for batch in pool.submit(generate, str(model), alone, **settings).result().tokens]
    with serving_preloaded(model, "--max-model-len", "256") as server:

        def complete(prompt: list[int]) -> list[int]:
            body = {"model": "model", "prompt": prompt, "return_token_ids": True, **GREEDY_160}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=200)
            assert answer.status_code == 200, answer.text
            tokens: list[int] = answer.json()["choices"][0]["token_ids"]
            return tokens

        assert [complete(prompt) for prompt in PROMPTS[:1]] == expected[:1]
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            running = [threads.submit(complete, prompt) for prompt in PROMPTS]
            wait_until(lambda: server.metric("num_requests_running") == len(PROMPTS), "all streams")
            server.services["worker"].kill()
            assert [future.result() for future in running] == expected
        assert "the prefix cache is off: this model has recurrent states" in server.log.read_text()


def refusals(model: str) -> list[str]:
    """Load `model` with one group of KV cache, then with all."""
    worker = VllmWorker(model=model)
    alone = msgspec.structs.replace(worker.next_assignment(), max_kv_groups=1)
    with pytest.raises(LoadError) as first:
        worker.runner.load(alone, lambda phase, fraction: None)
    with pytest.raises(LoadError) as second:
        VllmWorker(model=model).enter(FEW_BLOCKS)
    return [str(first.value), str(second.value)]


def test_what_no_group_or_block_holds_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid = checkpoints.MAKERS["granite-hybrid"]
    monkeypatch.setitem(checkpoints.MAKERS, "granite-hybrid", partial(hybrid, mamba_d_state=64))
    wide = checkpoints.make("granite-hybrid", tmp_path / "wide")
    with processes() as pool:
        grouped, size = pool.submit(refusals, str(wide)).result()
    assert "without --disable-hybrid-kv-cache-manager and --batching-policy phased" in grouped
    assert size == "--block-size 32 does not fit this model; start the scheduler with --block-size 96"
