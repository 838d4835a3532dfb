"""Every combination of the capability table serves with the same answers, or is refused with its reason."""

import re
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from protocol.requests import FinishReason
from protocol.sampling import GrammarKind, SamplingParams, StructuredOutputParams
from services.checkpoint import DEMO_MODEL
from services.config import SchedulerConfig
from services.scheduler.capabilities import Combination, refusal, table
from services.scheduler.policies import BUILT_IN
from tests.integration.scheduler.engine import PATIENCE, engine
from tests.matrix import pairwise

WORKERS: dict[str, dict[str, object]] = {
    "native": {"backend": "native", "threads": 1, "kv_cache_memory_bytes": 64 << 20},
    "sim": {"backend": "sim", "sim_step_ms": 1.0},
    "sim rigid": {"backend": "sim", "sim_step_ms": 1.0, "sim_rigid": True},
}
CELLS = {
    cell: reason
    for cell, reason in table()
    if cell.backend in WORKERS
    and (not cell.speculation or (cell.runs_ahead and (reason is None or cell.backend == "sim")))
}
"""vLLM's combinations run in its own environment: tests/vllm. Synchronous drafts are tested in test_speculation.py;
their refusal does not depend on the backend."""
TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}
STREAMS = range(8)
STRUCTURED = range(8, 12)
DATE = StructuredOutputParams(GrammarKind.REGEX, "[0-9]{4}-[0-9]{2}-[0-9]{2}(T[0-9]{2}:[0-9]{2}){8}")


def scheduler(cell: Combination) -> dict[str, object]:
    stages = 2 if cell.pipeline else 1
    return {
        "batching_policy": cell.batching_policy,
        "pipeline_parallel_size": stages,
        "batch_queue_depth": stages + cell.runs_ahead,
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "settle_seconds": 0,
        "speculative_config": DRAFTS if cell.speculation else None,
    }


def answers(cell: Combination, directory: Path) -> dict[int, list[int]]:
    """Return the answers of plain and structured requests together: no request changes another's answer."""
    directory.mkdir(exist_ok=True)
    with engine(directory, scheduler(cell), WORKERS[cell.backend], 2 if cell.pipeline else 1) as running:
        client = running.connect()
        state = client.wait_ready()
        assert (state.info["batching_policy"], state.info["scheduling_policy"]) == (cell.batching_policy, "fcfs")
        for number in (*STREAMS, *STRUCTURED):
            prompt = [(number * 37 + i * 11) % 4000 for i in range(5 + 20 * number)]
            params = SamplingParams(max_tokens=16, temperature=float(number % 2), seed=number)
            structured = DATE if number in STRUCTURED else None
            client.generate(number, prompt, params, structured=structured)
        client.wait_finished(*STREAMS, *STRUCTURED)
        assert {finish.reason for finish in client.finished.values()} == {FinishReason.LENGTH}
        assert set(running.stop()) == {0}
    return client.tokens


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, list[int]]]:
    """Return backend -> answers of the simplest combination. A rigid device simulates the same model."""
    plain = {
        backend: answers(Combination("chunked", False, False, backend), tmp_path_factory.mktemp("plain"))
        for backend in ("native", "sim")
    }
    for tokens in plain.values():
        assert {len(tokens[number]) for number in STRUCTURED} == {16}
        texts = [TOKENIZER.decode(tokens[number]) for number in STRUCTURED]
        assert all(re.match(r"\d{4}-\d{2}-\d{2}", text) for text in texts), texts
    return plain | {"sim rigid": plain["sim"]}


@pytest.mark.parametrize(
    "cell", pairwise([cell for cell in CELLS if CELLS[cell] is None and not cell.structured], astuple)
)
def test_cell_that_is_not_refused_serves_the_same_answers(
    cell: Combination, expected: dict[str, dict[int, list[int]]], tmp_path: Path
) -> None:
    assert CELLS[replace(cell, structured=True)] is None
    assert answers(cell, tmp_path) == expected[cell.backend]


@pytest.mark.parametrize(
    "cell", pairwise([cell for cell in CELLS if CELLS[cell] is not None and not cell.structured], astuple)
)
def test_cell_that_is_refused_names_the_reason_and_the_scheduler_stays(cell: Combination, tmp_path: Path) -> None:
    with engine(tmp_path, scheduler(cell), WORKERS[cell.backend]) as running:
        assert running.worker.wait(PATIENCE) == 4
        assert str(refusal(cell)) in running.log(running.worker)
        assert running.scheduler.poll() is None


def test_the_table_covers_every_built_in_policy() -> None:
    assert {cell.batching_policy for cell in CELLS} == set(BUILT_IN)


def test_stages_are_balanced_by_default() -> None:
    """`make bench NAME=balanced_policy`: faster in all rows but one, which loses less than 1 %."""
    assert SchedulerConfig().policy == "chunked"
    assert SchedulerConfig(pipeline_parallel_size=2).policy == "balanced"
    assert SchedulerConfig(pipeline_parallel_size=2, batching_policy="chunked").policy == "chunked"
