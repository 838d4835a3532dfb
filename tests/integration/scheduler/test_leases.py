"""A frontend whose connection stays open, but which sends nothing more: its requests end with its lease."""

import time
from pathlib import Path

from protocol.requests import FinishReason, FrontendAlive
from protocol.sampling import SamplingParams
from tests.integration.scheduler.engine import engine

LIMITS = {"max_model_len": 4096, "max_num_seqs": 4, "scheduler_timeout_seconds": 2.0}
WORKER = {"backend": "sim", "sim_step_ms": 5.0, "sim_vocab_size": 1000}


def test_requests_of_a_silent_frontend_end_and_others_continue(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=4000, temperature=0.0)
    with engine(tmp_path, LIMITS, WORKER) as running:
        silent, other = running.connect(), running.connect()
        for frontend in (silent, other):
            frontend.generate(1, [5, 6, 7], params)
        silent.send(FrontendAlive())
        seen = 0.0
        while other.state is None or other.state.stats["num_requests_running"] != 1 or seen < 2:
            other.receive()
            if other.state is not None:
                seen = max(seen, other.state.stats["num_requests_running"])
        other.generate(2, [5, 6], SamplingParams(max_tokens=3, temperature=0.0))
        other.wait_finished(2)
        assert other.finished[2].reason is FinishReason.LENGTH
        assert 1 not in other.finished, "the other frontend has no lease, and its request goes on"
        other.abort(1)
        before = silent.state.lease
        silent.send(FrontendAlive())
        while silent.state.lease == before:
            silent.receive()
        assert 0 < before < silent.state.lease, "it is informed, and can submit its requests again"
        assert set(running.stop()) == {0}
        assert "it has sent no sign of life" in running.log(running.scheduler)


def test_short_requests_one_after_another_do_not_put_off_signs_of_life(tmp_path: Path) -> None:
    """Every end of a request is a new state for the frontends, and a report. Without signs of life, the scheduler would
    take itself for one that was stopped."""
    short = SamplingParams(max_tokens=2, temperature=0.0)
    with engine(tmp_path, LIMITS, WORKER) as running:
        frontend = running.connect()
        began, number = time.monotonic(), 0
        while time.monotonic() - began < 1.5 * LIMITS["scheduler_timeout_seconds"]:
            number += 1
            frontend.generate(number, [5, 6, 7], short)
            frontend.wait_finished(number)
        assert set(running.stop()) == {0}
