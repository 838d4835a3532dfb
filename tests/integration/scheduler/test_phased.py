"""The phased policy over real rigid workers: answers are those of other policies, and steps really overlap."""

import os
from pathlib import Path

import pytest

from tests.integration.scheduler.step_trace import serve_traced

SIM = {"backend": "sim", "sim_step_ms": 30.0, "sim_vocab_size": 1000}
"""Steps long enough that the order of events is that of most steps on a busy machine."""
REQUESTS, SEATS, TOKENS = (range(12), 6, 20) if os.environ.get("RUNAHEAD_SOAK") else (range(0, 12, 2), 3, 10)
"""The number of a request decides its length: one to five chunks."""
LIMITS = {"max_model_len": 256, "block_size": 16, "max_num_batched_tokens": 32, "max_num_seqs": SEATS}
PHASED = {**LIMITS, "batching_policy": "phased", "phased_max_volume": 512}
RIGID = {**SIM, "sim_rigid": True, "sim_max_volume": 512}


@pytest.mark.timeout(300)
def test_rigid_ranks_answer_as_others_do_and_are_never_waited_for(tmp_path: Path) -> None:
    """At TP 1 and 4. The scheduler waits only for a last chunk while no other request can decode."""
    expected, _ = serve_traced(tmp_path / "chunked", LIMITS, SIM, REQUESTS, TOKENS)
    for ranks in (1, 4):
        scheduler = {**PHASED, "tensor_parallel_size": ranks}
        tokens, share_ahead = serve_traced(tmp_path / f"tp{ranks}", scheduler, RIGID, REQUESTS, TOKENS, ranks)
        assert tokens == expected
        assert share_ahead >= 0.8
    synchronous = {**PHASED, "batch_queue_depth": 1}
    assert serve_traced(tmp_path / "synchronous", synchronous, RIGID, REQUESTS, TOKENS) == (expected, 0)
