"""The running services with simulated ranks: a scheduler ahead of stages, and the tokens of one rank."""

from pathlib import Path

import pytest

from protocol.requests import FinishReason
from protocol.sampling import SamplingParams
from tests.integration.scheduler.engine import FrontendConnection, engine
from tests.integration.scheduler.step_trace import read_steps

SIM = {"backend": "sim", "sim_vocab_size": 1000, "sim_prefill_token_us": 0.0}
HOP, STEP = 0.002, 0.004
"""Seconds of a hop, and of a step on one stage."""
REQUESTS = range(12)
TIGHT = {"num_gpu_blocks_override": 16, "max_model_len": 128}
"""KV blocks for three or four requests."""


def run_load(directory: Path, scheduler: dict[str, object], tp: int = 1, pp: int = 1) -> FrontendConnection:
    """Run twelve requests of 24 tokens, half of them sampled, and one more that is aborted."""
    directory.mkdir()
    worker = {**SIM, "sim_step_ms": 1e3 * STEP * pp, "sim_hop_ms": 1e3 * HOP}
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "max_model_len": 512}
    sizes["step_trace"] = str(directory / "trace")
    with engine(directory, {**sizes, **scheduler}, worker, tp * pp) as running:
        client = running.connect()
        for number in REQUESTS:
            ids = [(number * 37 + i * 11) % 1000 for i in range(24 + number)]
            client.generate(number, ids, SamplingParams(max_tokens=24, temperature=float(number % 2), seed=number))
        client.generate(99, [1, 2, 3], SamplingParams(max_tokens=64, temperature=0.0))
        while len(client.tokens[99]) < 2:
            client.receive()
        client.abort(99)
        client.wait_finished(*REQUESTS)
        assert {client.finished[number].reason for number in REQUESTS} == {FinishReason.LENGTH}
        assert set(running.stop()) == {0}
    del client.tokens[99]
    return client


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    """Return the tokens of one rank at depth one."""
    return run_load(tmp_path_factory.mktemp("one") / "rank", {"batch_queue_depth": 1}).tokens


def check_trace(path: Path, ranks: int) -> None:
    """Every rank computes every step, and takes its share of the time; a busy host takes longer. A record that is
    written at the end may lack the reports of ranks that return no result."""
    steps = [step["ranks"] for step in read_steps(path).values()]
    assert len([step for step in steps if len(step) == ranks]) > len(steps) / 2
    assert min(times["forward_ended"] - times["forward_began"] for step in steps for times in step) >= STEP - 1e-9


@pytest.mark.parametrize(
    ("tp", "pp", "settings"),
    [
        pytest.param(1, 4, {}, marks=pytest.mark.soak),  # with blocks for all requests, as (1, 3) per change
        (1, 2, {"async_scheduling": False}),
        (2, 2, {"batch_queue_depth": 4, "max_num_batched_tokens": 64}),
        (1, 4, TIGHT),
        (1, 3, {"batching_policy": "balanced"}),
    ],
)
def test_many_ranks_serve_the_tokens_of_one(
    tmp_path: Path, alone: dict[int, list[int]], tp: int, pp: int, settings: dict[str, object]
) -> None:
    """Same tokens: with and without run-ahead, chunked prompts, preemptions, an abort."""
    client = run_load(tmp_path / "ranks", settings, tp, pp)
    assert client.tokens == alone
    if settings is TIGHT:
        assert sum(client.finished[number].num_preemptions for number in REQUESTS)
    check_trace(tmp_path / "ranks" / "trace", tp * pp)
