"""The phased policy over real rigid workers: answers are those of other policies, and steps really overlap."""

import os
from pathlib import Path

import pytest

from protocol.requests import FinishReason
from protocol.sampling import SamplingParams
from tests.integration.scheduler.engine import engine
from tests.integration.scheduler.step_trace import steps_ahead

SIM = {"backend": "sim", "sim_step_ms": 30.0, "sim_vocab_size": 1000}
"""Steps long enough that the order of events is that of most steps on a busy machine."""
REQUESTS, SEATS, TOKENS = (range(12), 6, 20) if os.environ.get("RUNAHEAD_SOAK") else (range(0, 12, 2), 3, 10)
"""The number of a request decides its length: one to five chunks."""
LIMITS = {"max_model_len": 256, "block_size": 16, "max_num_batched_tokens": 32, "max_num_seqs": SEATS}
PHASED = {**LIMITS, "batching_policy": "phased", "phased_max_volume": 512}
RIGID = {**SIM, "sim_rigid": True, "sim_max_volume": 512}


def answers(
    tmp_path: Path, scheduler: dict[str, object], worker: dict[str, object], workers: int = 1
) -> tuple[dict[int, list[int]], Path]:
    """Serve requests of one to five chunks, twice as many as there are seats. Return their tokens and the trace."""
    tmp_path.mkdir()
    trace = tmp_path / "trace.jsonl"
    with engine(tmp_path, {**scheduler, "step_trace": str(trace)}, worker, workers) as running:
        client = running.connect()
        for number in REQUESTS:
            prompt = [(number * 37 + i * 11) % 1000 for i in range(7 + 13 * number)]
            params = SamplingParams(max_tokens=TOKENS, temperature=float(number % 2), seed=number)
            client.generate(number, prompt, params)
        client.wait_finished(*REQUESTS)
        assert {finish.reason for finish in client.finished.values()} == {FinishReason.LENGTH}
        assert set(running.stop()) == {0}
    return client.tokens, trace


@pytest.mark.timeout(300)
def test_rigid_ranks_answer_as_others_do_and_are_never_waited_for(tmp_path: Path) -> None:
    """At TP 1 and 4. The scheduler waits only for a last chunk while no other request can decode."""
    expected, _ = answers(tmp_path / "chunked", LIMITS, SIM)
    for ranks in (1, 4):
        scheduler = {**PHASED, "tensor_parallel_size": ranks}
        tokens, trace = answers(tmp_path / f"tp{ranks}", scheduler, RIGID, ranks)
        assert tokens == expected
        early, steps = steps_ahead(trace)
        assert early >= 0.8 * steps
    tokens, trace = answers(tmp_path / "synchronous", {**PHASED, "batch_queue_depth": 1}, RIGID)
    assert tokens == expected
    assert steps_ahead(trace)[0] == 0
