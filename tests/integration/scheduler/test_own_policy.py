"""A policy of an installed package serves over real processes: the example in tests/examples/steady_decode."""

import os
from pathlib import Path

import pytest

from protocol.requests import FinishReason
from tests.examples.install import STEADY_DECODE, install
from tests.integration.scheduler.engine import engine

WORKER = {"backend": "sim", "sim_step_ms": 1.0, "sim_vocab_size": 1000}
LIMITS = {"max_model_len": 256, "max_num_batched_tokens": 32, "max_num_seqs": 6}


def answers(directory: Path, policy: str) -> dict[int, list[int]]:
    directory.mkdir()
    with engine(directory, {**LIMITS, "batching_policy": policy}, WORKER) as running:
        client = running.connect()
        assert client.wait_ready().info["batching_policy"] == policy
        client.generate_all(range(12), 20, growth=13)
        client.wait_finished(*range(12))
        assert {finish.reason for finish in client.finished.values()} == {FinishReason.LENGTH}
        assert set(running.stop()) == {0}
        assert "the batching policy failed" not in running.log(running.scheduler)
    return client.tokens


def test_a_registered_policy_gives_the_same_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install(STEADY_DECODE, site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    assert answers(tmp_path / "steady", "steady") == answers(tmp_path / "chunked", "chunked")
