"""Running services: the scheduler is one step ahead at depth two, never at depth one, and answers are the same."""

import signal
from pathlib import Path

import pytest

from protocol.requests import EnginePhase, FinishReason
from protocol.sampling import SamplingParams
from services.config import WorkerConfig
from services.process import NO_ALARM
from services.worker.backends.sim import SimRunner
from services.worker.scheduler_link import SchedulerLink
from tests.integration.scheduler.engine import PATIENCE, engine
from tests.integration.scheduler.step_trace import serve_traced

SIM = {"backend": "sim", "sim_step_ms": 30.0, "sim_vocab_size": 1000}
"""Steps long enough that the order of events is that of most steps on a busy machine."""


def test_depth_two_schedules_ahead_and_depth_one_never_does(tmp_path: Path) -> None:
    runs = []
    for depth in (1, 2):
        scheduler = {"batch_queue_depth": depth, "max_model_len": 512}
        runs.append(serve_traced(tmp_path / f"{depth}", scheduler, SIM, range(16), 24))
    (one, ahead_at_one), (two, ahead_at_two) = runs
    assert (ahead_at_one, ahead_at_two > 0.8) == (0, True)
    assert one == two


@pytest.mark.parametrize("stopped", [("scheduler",), ("scheduler", "workers"), ("workers", "scheduler")])
def test_draining_scheduler_finishes_open_requests_and_rejects_new_ones(
    tmp_path: Path, stopped: tuple[str, ...]
) -> None:
    """Also if its workers are stopped together with it, as when all containers are. The requests take longer than a
    worker that is stopped alone goes on."""
    scheduler = {"max_model_len": 512, "pipeline_parallel_size": 2}
    with engine(tmp_path, scheduler, SIM, num_workers=2) as running:
        client = running.connect()
        client.generate(1, list(range(40)), SamplingParams(max_tokens=120, temperature=0.0))
        client.read_until(lambda: client.tokens[1])
        for service in stopped:
            for process in running.workers if service == "workers" else [running.scheduler]:
                process.send_signal(signal.SIGTERM)
        assert client.wait_state(lambda state: state.phase is EnginePhase.DRAINING).detail == "stopping"
        client.generate(2, list(range(40)), SamplingParams(max_tokens=5, temperature=0.0))
        client.wait_finished(1, 2)
        assert (client.finished[1].reason, len(client.tokens[1])) == (FinishReason.LENGTH, 120)
        assert (client.finished[2].reason, client.tokens[2]) == (FinishReason.REJECTED, [])
        client.close()
        assert [process.wait(PATIENCE) for process in (running.scheduler, *running.workers)] == [0, 0, 0]
        assert "has ended" not in running.log(running.scheduler)


@pytest.mark.parametrize(
    ("layout", "worker"),
    [("pipeline_parallel_size", {"backend": "sim", "sim_step_ms": 30.0}), ("tensor_parallel_size", {"threads": 1})],
)
def test_a_rank_that_is_stopped_and_replaced_causes_no_warning(
    tmp_path: Path, layout: str, worker: dict[str, object]
) -> None:
    with engine(tmp_path, {"max_model_len": 512, layout: 2}, worker, num_workers=2) as running:
        client = running.connect()
        client.generate(1, list(range(40)), SamplingParams(max_tokens=400, temperature=0.0))
        while not client.tokens[1]:
            client.receive()
        running.worker.send_signal(signal.SIGTERM)
        assert running.worker.wait(PATIENCE) == 0
        before = len(client.tokens[1])
        running.add_worker()
        while len(client.tokens[1]) <= before + 8:
            client.receive()
        assert not client.finished
        assert [
            log for process in (running.scheduler, *running.workers) if "WARNING" in (log := running.log(process))
        ] == []


def test_a_scheduler_that_is_stopped_after_its_workers_ends_too(tmp_path: Path) -> None:
    """It leaves open requests to other engines, or to the scheduler after it."""
    with engine(tmp_path, {"max_model_len": 512}, SIM) as running:
        client = running.connect()
        client.generate(1, list(range(40)), SamplingParams(max_tokens=400, temperature=0.0))
        client.read_until(lambda: client.tokens[1])
        running.worker.send_signal(signal.SIGTERM)
        assert running.worker.wait(PATIENCE) == 0
        client.wait_state(lambda state: state.phase is EnginePhase.RECOVERING)
        running.scheduler.send_signal(signal.SIGTERM)
        client.wait_state(lambda state: state.phase is EnginePhase.DRAINING)
        assert running.scheduler.wait(PATIENCE) == 0
        assert not client.finished


def test_a_draining_scheduler_expects_no_worker_that_is_stopped_before_it_registers(tmp_path: Path) -> None:
    with engine(tmp_path, {"max_model_len": 512, "recovery_timeout_seconds": 600}, SIM) as running:
        client = running.connect()
        client.generate(1, list(range(40)), SamplingParams(max_tokens=400, temperature=0.0))
        while not client.tokens[1]:
            client.receive()
        running.worker.kill()
        client.wait_state(lambda state: state.phase is EnginePhase.RECOVERING)  # a loss that is noticed later counts
        config = WorkerConfig.model_validate({**SIM, "scheduler_endpoint": f"ipc://{tmp_path}/w"})
        starts = SchedulerLink(config, SimRunner(config), NO_ALARM)
        starts.connect_within(PATIENCE)
        running.scheduler.send_signal(signal.SIGTERM)
        client.wait_state(lambda state: state.phase is EnginePhase.DRAINING)
        starts.results.is_stopped = True
        starts.results.leave()
        starts.close()
        assert running.scheduler.wait(PATIENCE) == 0
        assert not client.finished
