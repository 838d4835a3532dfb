"""Workers that are lost, come later and do not fit: the scheduler goes on, and answers as in an undisturbed run."""

import signal
from pathlib import Path

import pytest

from protocol.requests import EnginePhase, FinishReason
from protocol.sampling import SamplingParams
from services.config import WorkerConfig
from tests.integration.scheduler.engine import PATIENCE, EngineProcesses, FrontendConnection, engine

SIM = {"backend": "sim", "sim_step_ms": 10.0, "sim_vocab_size": 1000}
SCHEDULER = {"max_model_len": 512, "heartbeat_timeout_seconds": 2.0}
REQUESTS, TOKENS = range(16), 80


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    """The answers of an undisturbed run."""
    with engine(tmp_path_factory.mktemp("undisturbed"), SCHEDULER, SIM) as running:
        client = running.connect()
        client.generate_all(REQUESTS, TOKENS)
        client.wait_finished(*REQUESTS)
        return client.tokens


def started(running: EngineProcesses, after: int) -> FrontendConnection:
    """A client with all requests open and `after` tokens of the first delivered."""
    client = running.connect()
    client.generate_all(REQUESTS, TOKENS)
    client.read_until(lambda: len(client.tokens[0]) >= after)
    return client


def finished(client: FrontendConnection, undisturbed: dict[int, list[int]]) -> None:
    client.wait_finished(*REQUESTS)
    assert {finish.reason for finish in client.finished.values()} == {FinishReason.LENGTH}
    assert client.tokens == undisturbed


def test_killed_worker_is_replaced_by_one_that_comes_later(tmp_path: Path, undisturbed: dict[int, list[int]]) -> None:
    with engine(tmp_path, SCHEDULER, SIM) as running:
        client = started(running, 10)
        running.worker.kill()
        client.wait_state(lambda state: state.phase is EnginePhase.RECOVERING)
        assert "its connection broke" in client.state.detail
        client.generate(99, [1, 2, 3], SamplingParams(max_tokens=5, temperature=0.0))  # may queue
        running.add_worker()
        client.wait_finished(99)
        assert len(client.tokens.pop(99)) == 5
        assert client.finished.pop(99).reason is FinishReason.LENGTH
        finished(client, undisturbed)


def test_open_requests_fail_when_recovery_takes_too_long(tmp_path: Path) -> None:
    with engine(tmp_path, SCHEDULER | {"recovery_timeout_seconds": 0.5}, SIM) as running:
        client = started(running, 3)
        running.worker.kill()
        client.wait_finished(*REQUESTS)
        assert {finish.reason for finish in client.finished.values()} == {FinishReason.ERROR}
        running.add_worker()
        client.wait_state(lambda state: state.phase is EnginePhase.READY)
        client.generate(99, [1, 2, 3], SamplingParams(max_tokens=5, temperature=0.0))
        client.wait_finished(99)
        assert len(client.tokens[99]) == 5


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"sim_vocab_size": 2000}, "model hash mismatch"),
        ({"backend": "native", "sim_vocab_size": 0, "sim_step_ms": WorkerConfig().sim_step_ms}, "backend mismatch"),
    ],
)
def test_worker_that_does_not_fit_is_refused_by_name_and_the_scheduler_goes_on(
    tmp_path: Path, other: dict[str, object], named: str
) -> None:
    """Both values are named, and the worker's exit status is that of a refusal."""
    with engine(tmp_path, SCHEDULER, SIM) as running:
        client = running.connect()
        worker = running.add_worker(**other)
        assert worker.wait(PATIENCE) == 4
        assert named in running.log(worker)
        client.generate(1, [1, 2, 3], SamplingParams(max_tokens=5, temperature=0.0))
        client.wait_finished(1)
        assert len(client.tokens[1]) == 5


def wait_size(client: FrontendConnection, size: str) -> None:
    client.wait_state(lambda s: s.info.get("tensor_parallel_size") == size and s.phase is EnginePhase.READY)


def test_auto_grows_and_shrinks_with_the_workers_under_load(tmp_path: Path, undisturbed: dict[int, list[int]]) -> None:
    """As with `docker compose up --scale worker=2` and back; open requests are carried over."""
    auto = {"tensor_parallel_size": "auto", "settle_seconds": 2.0}
    with engine(tmp_path, SCHEDULER | auto, SIM | {"sim_step_ms": 40.0}) as running:
        client = running.connect()
        assert client.wait_ready().info["tensor_parallel_size"] == "1"
        second = running.add_worker()
        client.wait_state(lambda state: state.stats.get("num_workers") == 2)
        client.generate_all(
            REQUESTS, TOKENS
        )  # while the group settles: a worker may take longer to start than requests to end
        wait_size(client, "2")
        before = len(client.tokens[0])
        client.read_until(lambda: len(client.tokens[0]) > before or 0 in client.finished)
        second.send_signal(signal.SIGTERM)
        wait_size(client, "1")
        finished(client, undisturbed)
        assert second.wait(PATIENCE) == 0
