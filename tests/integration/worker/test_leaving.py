"""A worker that leaves while a step waits for masks. Nobody delivers them any more."""

import signal
from pathlib import Path
from threading import Event

import pytest
from msgspec.structs import replace

from protocol.codec import pack
from protocol.membership import InitializeCache
from protocol.steps import StepFault
from services.worker.backends.sim import SimRunner
from services.worker.runner import RanksLost
from services.worker.service import EXIT_FAULT
from tests.integration.worker.scripted import PATIENCE, ScriptedWorkerServer, exit_status, worker_process, worker_thread
from tests.unit.worker.plans import BLOCKS, CONTEXT, one_request


def test_a_signal(scheduler: ScriptedWorkerServer, tmp_path: Path) -> None:
    with worker_process(tmp_path) as process:
        scheduler.serve()
        plans, request = one_request()
        scheduler.send(plans.step(request, masked=[request]))
        scheduler.wait_heartbeat()
        process.send_signal(signal.SIGTERM)
        while not scheduler.wait_heartbeat().is_stopped:
            pass
        process.send_signal(signal.SIGTERM)
        status, log = exit_status(process)
    assert (status, "did not end" in log) == (0, False), log


class AllocatingRunner(SimRunner):
    waits, aborted = Event(), Event()

    def init_kv_cache(self, init: InitializeCache) -> None:
        """Wait for other ranks, as a pipeline stage does."""
        self.waits.set()
        self.aborted.wait()
        raise RanksLost("aborted")

    def abort(self) -> None:
        self.aborted.set()


def test_a_shutdown_while_a_rank_waits_for_others_is_no_loss(
    scheduler: ScriptedWorkerServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with worker_thread(scheduler, tmp_path, AllocatingRunner) as worker:
        scheduler.registered()
        scheduler.load()
        scheduler.send(InitializeCache(BLOCKS, CONTEXT))
        AllocatingRunner.waits.wait()
        scheduler.stop()
        assert worker.exit_status() == 0
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


class PausingRunner(SimRunner):
    reported = Event()

    def end_masks(self) -> None:
        """Let the thread that waits for masks report the end of its wait, if it does."""
        super().end_masks()
        assert self.reported.wait(PATIENCE)


def test_a_failed_step_behind_it_is_reported(scheduler: ScriptedWorkerServer, tmp_path: Path) -> None:
    with worker_thread(scheduler, tmp_path, PausingRunner) as worker:
        scheduler.serve()
        plans, request = one_request()
        first, second = (plans.step(request, masked=[request]) for _ in range(2))
        scheduler.send(first, replace(second, starts=pack([99])))
        fault = scheduler.next_message()
        PausingRunner.reported.set()
        assert isinstance(fault, StepFault)
        assert fault.step_id == 2
        assert "starts at 99" in fault.error
        assert worker.exit_status() == EXIT_FAULT
