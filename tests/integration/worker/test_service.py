"""The worker's service on real ipc sockets: its messages, their order, and how it leaves."""

import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from protocol.codec import pack
from protocol.epochs import NUMBER_BITS
from protocol.membership import InitializeCache, Loaded, LoadFailed, LoadProgress, Ready, Register, Shard, Shutdown
from protocol.steps import ModelRunnerOutput, ReleaseSlots, StepFault, StepTimes
from services.worker.backends.sim import SimRunner
from services.worker.service import EXIT_FAULT, EXIT_LOST, EXIT_MODEL, EXIT_REFUSED, Worker
from tests.integration.worker.scripted import EPOCH, ScriptedWorkerServer, exit_status, worker_process, worker_thread
from tests.unit.worker.plans import (
    BLOCKS,
    CONTEXT,
    GREEDY,
    VOCAB,
    PlanBuilder,
    alone,
    grammar_output,
    one_request,
    prompt,
    sampled,
    tokens,
)


def step_ids(results: list[ModelRunnerOutput | StepFault]) -> list[int]:
    return [result.step_id for result in results]


def in_order(times: StepTimes) -> bool:
    """Return True if every moment was measured and is not earlier than the one before."""
    moments = (times.received, times.prepared, times.forward_began, times.forward_ended, times.sampled, times.sent)
    return 0 < moments[0] and all(before <= after for before, after in pairwise(moments))


# -- serving -----------------------------------------------------------------------------------------------------


def test_from_registration_to_orderly_end(scheduler: ScriptedWorkerServer, tmp_path: Path) -> None:
    """The canary ran, the first real token is right, results leave in step order, and no prompt is logged."""
    with worker_process(tmp_path) as process:
        loaded = scheduler.serve()
        assert (loaded.simulated, loaded.vocab_size) == (True, VOCAB)
        assert any(isinstance(message, LoadProgress) for message in scheduler.received)
        plans = PlanBuilder()
        a, b = plans.admit([91, 92, 93, 94]), plans.admit(prompt(2, 9), sampled(4))
        scheduler.send(*(plans.step(a, b) for _ in range(5)))
        results = scheduler.results(5)
        assert step_ids(results) == [1, 2, 3, 4, 5]
        assert [tokens(r)[a.slot] for r in results] == alone(a.prompt, GREEDY, 5)
        assert [tokens(r)[b.slot] for r in results] == alone(prompt(2, 9), sampled(4), 5)
        assert all(in_order(r.times) for r in results)
        assert results[0].times.idle == 0
        scheduler.send(ReleaseSlots(EPOCH, pack([a.slot, b.slot])), Shutdown("enough"))
        status, text = exit_status(process)
        assert status == 0
        assert "leaving: enough" in text
        assert "91" not in text.replace(str(process.pid), "")
        assert len(text.splitlines()) < 10


def test_idle_is_the_wait_for_a_plan(scheduler: ScriptedWorkerServer, tmp_path: Path) -> None:
    """No step is queued between these, so the device is idle from the end of one to the start of the next; a result
    carries this time. On a busy machine a plan may arrive before the worker waits for it; then the time is 0."""
    with worker_thread(scheduler, tmp_path, sim_step_ms=20.0):
        scheduler.serve()
        plans, request = one_request()
        results: list[ModelRunnerOutput] = []
        while not any(result.times.idle for result in results):
            scheduler.send(plans.step(request))
            results += scheduler.results(1)
        for before, after in pairwise(results):
            assert 0 <= after.times.idle <= after.times.forward_began - before.times.sampled


def test_queued_steps_leave_no_idle_time(scheduler: ScriptedWorkerServer, tmp_path: Path) -> None:
    with worker_thread(scheduler, tmp_path, sim_step_ms=200.0):
        scheduler.serve()
        plans, request = one_request()
        scheduler.send(*(plans.step(request) for _ in range(3)))
        results = scheduler.results(3)
        assert [result.times.idle for result in results] == [0.0] * 3
        assert [r.times.forward_began for r in results[1:]] == [r.times.sampled for r in results[:-1]]


def test_heartbeats_leave_during_a_long_step(scheduler: ScriptedWorkerServer, tmp_path: Path) -> None:
    with worker_process(tmp_path, sim_step_ms=60_000.0, sim_prefill_token_us=0.0) as process:
        scheduler.registered()
        scheduler.assign()
        while not isinstance(scheduler.next_message(), LoadProgress):
            pass
        scheduler.next_message()
        scheduler.send(InitializeCache(16, 64))  # its canary step takes a minute
        first, second = scheduler.wait_heartbeat(), scheduler.wait_heartbeat()
        assert [(beat.epoch, beat.last_step_id) for beat in (first, second)] == [(EPOCH, 0)] * 2
        assert 0 < first.work <= second.work, "processor time of the start-up"
        process.kill()


def test_the_kept_result_of_a_repeated_step_is_sent_again(scheduler: ScriptedWorkerServer, tmp_path: Path) -> None:
    with worker_thread(scheduler, tmp_path):
        scheduler.serve()
        plans, request = one_request()
        steps = [plans.step(request) for _ in range(3)]
        scheduler.send(*steps, *steps[1:], plans.step(request))
        first, *sent, second, third, fourth = scheduler.results(6)
        assert [second, third] == sent
        assert step_ids([first, third, fourth]) == [1, 3, 4]


def test_messages_of_other_epochs_and_bad_frames_are_ignored(
    scheduler: ScriptedWorkerServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with worker_thread(scheduler, tmp_path):
        scheduler.serve()
        plans, request = one_request()
        plan = plans.step(request)
        other = msgspec.structs.replace(plan, epoch=EPOCH + 1)
        scheduler.send(other, grammar_output(other, []))
        scheduler.send_raw(b"\xc1 no message")
        scheduler.send_raw(b"")  # a check of the connection, no message
        scheduler.send_raw(b"\x90")
        scheduler.send(InitializeCache(16, 64), plan)
        (result,) = scheduler.results(1)
        assert tokens(result) == {request.slot: alone(prompt(1, 6), GREEDY, 1)[0]}
    assert caplog.text.count("bad message from the scheduler") == 3
    assert "InitializeCache is not allowed while SERVING" in caplog.text


# -- faults: each is reported in the place of its step's result, and nothing after it ------------------------------


def _wrong_generation(plans: PlanBuilder) -> list[msgspec.Struct]:
    """Execute fails on the host."""
    request = plans.admit(prompt(1, 6))
    good, bad = plans.step(request), plans.step(request)
    return [good, msgspec.structs.replace(bad, generations=pack([7])), plans.step(request)]


def _short_bitmask(plans: PlanBuilder) -> list[msgspec.Struct]:
    """Sampling fails on the thread that waits for the masks."""
    request = plans.admit(prompt(1, 6))
    good, bad = plans.step(request), plans.step(request, masked=[request])
    return [good, bad, grammar_output(bad, [request.slot], pack([1])), plans.step(request)]


def _token_outside_the_vocabulary(plans: PlanBuilder) -> list[msgspec.Struct]:
    """The device fails; the output thread gets its error."""
    request = plans.admit(prompt(1, 6))
    good = plans.step(request)
    return [good, plans.step(request, plans.admit([VOCAB])), plans.step(request)]


@pytest.mark.parametrize(
    ("script", "step_id", "text"),
    [
        (_short_bitmask, 2, "ProtocolError: the grammar of step 2 has "),
        (_token_outside_the_vocabulary, 2, f"OracleError: slot 1 position 0: token {VOCAB} is not among"),
    ],
)  # fmt: skip
def test_a_failed_step(
    scheduler: ScriptedWorkerServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    script: Callable[[PlanBuilder], list[msgspec.Struct]],
    step_id: int,
    text: str,
) -> None:
    with worker_thread(scheduler, tmp_path) as worker:
        scheduler.serve()
        scheduler.send_while_there(*script(PlanBuilder()))
        good, fault = scheduler.results(2)
        assert isinstance(good, ModelRunnerOutput)
        assert isinstance(fault, StepFault)
        assert (fault.epoch, fault.step_id) == (EPOCH, step_id)
        assert fault.error.startswith(text)
        assert worker.exit_status() == EXIT_FAULT
        assert fault.error in caplog.text
        assert scheduler.received[-1] is fault


def test_the_process_of_a_failed_step_exits_with_a_status_of_its_own(
    scheduler: ScriptedWorkerServer, tmp_path: Path
) -> None:
    with worker_process(tmp_path) as process:
        scheduler.serve()
        scheduler.send_while_there(*_wrong_generation(PlanBuilder()))
        _, fault = scheduler.results(2)
        text = "PlanError: slot 0: row of generation 7, but the slot has 1 (-1: empty)"
        assert fault == StepFault(EPOCH, 2, text)
        status, log = exit_status(process)
        assert status == EXIT_FAULT
        assert text in log


# -- leaving -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("then", ["shutdown", "end of epoch", "loss", "signal"])
def test_a_worker_that_is_stopped_serves_until_it_is_sent_away(
    scheduler: ScriptedWorkerServer, tmp_path: Path, number: int, then: str
) -> None:
    with worker_process(tmp_path) as process:
        scheduler.serve()
        process.send_signal(number)
        while not scheduler.wait_heartbeat().is_stopped:
            pass
        plans, request = one_request()
        scheduler.send(plans.step(request))
        assert step_ids(scheduler.results(1)) == [1]
        match then:
            case "shutdown":
                scheduler.stop()
            case "end of epoch":
                scheduler.end(EPOCH)
            case "loss":
                scheduler.close()
            case "signal":
                process.send_signal(number)
        status, text = exit_status(process)
        assert (status, "Traceback" in text, "WARNING" in text) == (0, False, False), text


def test_a_signal_ends_a_worker_that_does_not_serve(scheduler: ScriptedWorkerServer, tmp_path: Path) -> None:
    with worker_process(tmp_path) as process:
        scheduler.registered()
        process.send_signal(signal.SIGTERM)
        status, text = exit_status(process)
        assert (status, "Traceback" in text) == (0, False), text
        while not scheduler.wait_heartbeat().is_stopped:
            pass


def test_a_signal_while_the_worker_leaves_a_lost_scheduler_ends_it(
    scheduler: ScriptedWorkerServer, tmp_path: Path
) -> None:
    """The connections that would report it to the next scheduler are not made yet."""
    workers: list[Worker] = []

    class StoppedRunner(SimRunner):
        def leave(self) -> None:
            super().leave()
            workers[0].leave()

    with worker_thread(scheduler, tmp_path, StoppedRunner) as thread:
        workers.append(thread.worker)
        scheduler.serve()
        scheduler.close()
        assert thread.exit_status() == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fails", [False, True])
def test_a_signal_during_a_finaliser_ends_the_worker(
    scheduler: ScriptedWorkerServer, tmp_path: Path, fails: bool
) -> None:
    """Python prints an exception that a finaliser raises, and continues; numba, in a callback, fails then."""

    workers: list[Worker] = []

    class FinalisingRunner(SimRunner):
        def release(self, slots: NDArray[np.int32]) -> None:
            mortal = {0}
            reference = weakref.ref(mortal, workers[0].leave)
            del mortal
            assert reference() is None
            if fails:
                raise RuntimeError("no compiled object yet")

    with worker_thread(scheduler, tmp_path, FinalisingRunner) as thread:
        workers.append(thread.worker)
        scheduler.registered()
        scheduler.assign(EPOCH)
        while not isinstance(scheduler.next_message(), Loaded):
            pass
        scheduler.send(InitializeCache(BLOCKS, CONTEXT))  # the canary step releases its slot
        assert thread.exit_status() == 0


def test_an_exit_in_a_finaliser_prints_nothing_and_other_errors_do() -> None:
    code = """
import sys
from types import SimpleNamespace
from services.worker.service import hide_exits

class Mortal:
    def __init__(self, error):
        self.error = error
    def __del__(self):
        raise self.error

hide_exits()
Mortal(SystemExit(0))
sys.unraisablehook(SimpleNamespace(exc_type=OSError, object=None))  # of a signal
Mortal(OSError("a bug"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "OSError: a bug" in done.stderr
    assert "SystemExit" not in done.stderr


def test_results_of_steps_in_flight_are_sent_before_the_worker_leaves(
    scheduler: ScriptedWorkerServer, tmp_path: Path
) -> None:
    with worker_thread(scheduler, tmp_path, sim_step_ms=100.0) as worker:
        scheduler.serve()
        plans, request = one_request()
        scheduler.send(plans.step(request), plans.step(request), Shutdown())
        assert step_ids(scheduler.results(2)) == [1, 2]
        assert worker.exit_status() == 0


def test_a_worker_that_reads_the_shutdown_late_leaves_in_order(scheduler: ScriptedWorkerServer, tmp_path: Path) -> None:
    """The scheduler is gone long before the worker reads the shutdown, and before its next heartbeat."""
    with worker_process(tmp_path) as process:
        scheduler.serve()
        process.send_signal(signal.SIGSTOP)
        scheduler.stop()
        process.send_signal(signal.SIGCONT)
        status, log = exit_status(process)
        assert status == 0, log
        assert "leaving: the script ends" in log


def test_a_worker_registers_with_the_next_scheduler_and_keeps_its_weights(
    scheduler: ScriptedWorkerServer, tmp_path: Path
) -> None:
    """The epoch goes on counting, and an assignment of the older scheduler is ignored."""
    first, second = 7 << NUMBER_BITS | 1, 9 << NUMBER_BITS | 1
    with worker_thread(scheduler, tmp_path) as worker:
        scheduler.serve(first)
        scheduler.close()
        scheduler = ScriptedWorkerServer(f"ipc://{tmp_path}/w")
        try:
            register = scheduler.registered()
            assert (register.epoch, register.shard, register.returns) == (first, Shard(), True)
            scheduler.assign(first)
            scheduler.assign(second)
            assert isinstance(progress := scheduler.next_message(), LoadProgress)
            assert progress.epoch == second
            assert isinstance(scheduler.next_message(), Loaded)
            scheduler.send(InitializeCache(BLOCKS, CONTEXT, first), InitializeCache(BLOCKS, CONTEXT, second))
            assert scheduler.next_message() == Ready(second)
            plans = PlanBuilder()
            scheduler.send(msgspec.structs.replace(plans.step(plans.admit(prompt(1, 6))), epoch=second))
            assert step_ids(scheduler.results(1)) == [1]
            scheduler.send(Shutdown())
            assert worker.exit_status() == 0
        finally:
            scheduler.close()


def test_a_silent_scheduler_is_lost(scheduler: ScriptedWorkerServer, tmp_path: Path) -> None:
    """Its process may be stopped: the connections last. It may have been stopped before its first sign of life."""
    with worker_thread(scheduler, tmp_path, scheduler_timeout_seconds=2, recovery_timeout_seconds=0.2) as worker:
        scheduler.serve()
        assert worker.exit_status() == EXIT_LOST


def test_a_refused_worker_logs_the_reason(tmp_path: Path) -> None:
    scheduler = ScriptedWorkerServer(f"ipc://{tmp_path}/w", roles=("frontend",))
    try:
        with worker_process(tmp_path) as process:
            while process.poll() is None:
                scheduler.wait_refused()
            status, text = exit_status(process)
            assert status == EXIT_REFUSED
            assert "a 'worker' may not connect here" in text
    finally:
        scheduler.close()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"sim_vocab_size": 0, "model": "/no/such/model"}, "no such model directory: /no/such/model"),
        ({"kv_cache_memory_bytes": 1}, "1 bytes hold no KV block; one takes 32"),
        ({"host_ip": "192.0.2.1"}, "--host-ip 192.0.2.1: cannot listen on this address: Cannot assign requested"),
        ({"host_ip": "0.0.0.0"}, "--host-ip 0.0.0.0: it means all addresses of this machine"),
        ({"host_ip": "0"}, "--host-ip 0: it means all addresses of this machine"),
    ],
)
def test_a_model_that_cannot_be_served(
    scheduler: ScriptedWorkerServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    values: dict[str, object],
    text: str,
) -> None:
    with worker_thread(scheduler, tmp_path, **values) as worker:
        failed = scheduler.next_message()
        if isinstance(failed, Register):
            scheduler.assign()
            failed = scheduler.next_message()
        assert isinstance(failed, LoadFailed)
        assert text in failed.error
        assert "\n" not in failed.error
        assert worker.exit_status() == EXIT_MODEL
    assert not any(record.exc_info for record in caplog.records), "a traceback is logged"


def test_a_cache_that_cannot_be_allocated(scheduler: ScriptedWorkerServer, tmp_path: Path) -> None:
    """Every failure before Ready is one line to the scheduler."""
    with worker_process(tmp_path) as process:
        scheduler.registered()
        scheduler.assign()
        while isinstance(scheduler.next_message(), LoadProgress):
            pass
        scheduler.send(InitializeCache(2**31 - 1, 64))
        while isinstance(failed := scheduler.next_message(), Ready | LoadProgress):
            pass
        assert isinstance(failed, LoadFailed)
        assert exit_status(process)[0] == EXIT_MODEL
