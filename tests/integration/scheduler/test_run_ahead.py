"""Running services: the scheduler is one step ahead at depth two, never at depth one, and answers are the same."""

import signal
from pathlib import Path

from protocol.requests import EnginePhase, FinishReason
from protocol.sampling import SamplingParams
from tests.integration.scheduler.engine import PATIENCE, FrontendConnection, engine
from tests.integration.scheduler.step_trace import steps_ahead

SIM = {"backend": "sim", "sim_step_ms": 30.0, "sim_vocab_size": 1000}
"""Steps long enough that the order of events is that of most steps on a busy machine."""
REQUESTS = range(16)


def run_load(tmp_path: Path, depth: int) -> tuple[FrontendConnection, Path]:
    """Serve sixteen requests of 24 tokens. Return the client with their answers, and the step trace."""
    tmp_path.mkdir()
    trace = tmp_path / "trace.jsonl"
    scheduler = {"batch_queue_depth": depth, "step_trace": str(trace), "max_model_len": 512}
    with engine(tmp_path, scheduler, SIM) as running:
        client = running.connect()
        for number in REQUESTS:
            prompt = [(number * 37 + i * 11) % 1000 for i in range(24 + number)]
            temperature = float(number % 2)
            client.generate(number, prompt, SamplingParams(max_tokens=24, temperature=temperature, seed=number))
        client.wait_finished(*REQUESTS)
        assert {finish.reason for finish in client.finished.values()} == {FinishReason.LENGTH}
        assert running.stop() == (0, 0)
    return client, trace


def share_ahead(trace: Path) -> float:
    """Return the share of steps whose successor was dispatched before their result arrived."""
    ahead, steps = steps_ahead(trace)
    return ahead / steps


def test_depth_two_schedules_ahead_and_depth_one_never_does(tmp_path: Path) -> None:
    one, trace_1 = run_load(tmp_path / "one", depth=1)
    two, trace_2 = run_load(tmp_path / "two", depth=2)
    assert share_ahead(trace_1) == 0
    assert share_ahead(trace_2) > 0.8
    assert one.tokens == two.tokens


def test_draining_scheduler_finishes_open_requests_and_rejects_new_ones(tmp_path: Path) -> None:
    with engine(tmp_path, {"max_model_len": 512}, SIM) as running:
        client = running.connect()
        client.generate(1, list(range(40)), SamplingParams(max_tokens=60, temperature=0.0))
        while not client.tokens[1]:
            client.receive()
        running.scheduler.send_signal(signal.SIGTERM)
        while client.state is None or client.state.phase is not EnginePhase.DRAINING:
            client.receive()
        client.generate(2, list(range(40)), SamplingParams(max_tokens=5, temperature=0.0))
        client.wait_finished(1, 2)
        assert (client.finished[1].reason, len(client.tokens[1])) == (FinishReason.LENGTH, 60)
        assert (client.finished[2].reason, client.tokens[2]) == (FinishReason.REJECTED, [])
        client.close()
        assert (running.scheduler.wait(PATIENCE), running.worker.wait(PATIENCE)) == (0, 0)
