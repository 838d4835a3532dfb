"""Processes that do not run for a while, as on a busy machine or after SIGSTOP."""

import pytest

from services.scheduler.service import EXIT_REPLACED
from tests.simulation.whole.client import check_answer
from tests.simulation.whole.system import SILENCE, Layout, System

STOPPED, RUNNING, TIMES = SILENCE - 1.1, 0.3, 10


def test_a_frontend_that_seldom_runs_keeps_its_scheduler() -> None:
    """Its own pauses are no silence of the scheduler: it stays ready, and submits nothing again."""
    system = System(0, Layout(num_frontends=1))
    with system.started():
        frontend = system.frontends[0]
        for number in range(TIMES):
            system.send(system.hub.now + number)
            begin = number * (STOPPED + RUNNING)
            system.hub.after(begin, frontend.process.stop)
            system.hub.after(begin + STOPPED, frontend.process.go_on)
        system.hub.run(TIMES * (STOPPED + RUNNING))
        assert system.hub.run(30.0, lambda: system.answered)
        assert frontend.engine.ready
        assert not frontend.engine.recoveries
        assert not frontend.engine.ledger.resubmitted
        for request in system.requests:
            assert request.outcome == "done", request.error
            check_answer(request)


def test_a_scheduler_that_is_stopped_is_not_ready_long_before_it_is_lost() -> None:
    """Within 3 s probes fail. When it runs again in time, it is the same scheduler, and nothing is submitted again."""
    system = System(0, Layout(num_frontends=1))
    with system.started():
        frontend, scheduler = system.frontends[0], system.engine.scheduler
        scheduler.stop()
        assert system.hub.run(3.0, lambda: not frontend.engine.ready)
        assert frontend.engine.state.detail == "the scheduler gives no sign of life"
        request = system.send(system.hub.now)
        system.hub.after(0.3, scheduler.go_on)
        assert system.hub.run(30.0, lambda: system.answered and frontend.engine.ready)
        assert scheduler.alive
        assert not frontend.engine.ledger.resubmitted
        assert [recovery.name for recovery in frontend.engine.recoveries] == ["engine lost", "engine recovered"]
        check_answer(request)


def test_a_scheduler_that_seldom_runs_is_not_taken_for_dead() -> None:
    """Its first delays show that the machine is busy, and the later ones may be longer than on a quiet one."""
    system = System(0, Layout(num_frontends=1))
    with system.started():
        frontend, scheduler = system.frontends[0], system.engine.scheduler
        assert scheduler is not None
        at = 0.0
        for stopped in (1.5, 1.8, 2.2, 2.8, 2.8, 2.8):
            system.hub.after(at, scheduler.stop)
            system.hub.after(at + stopped, scheduler.go_on)
            at += stopped + RUNNING
        assert not system.hub.run(at + 2.0, lambda: not frontend.engine.ready)


@pytest.mark.parametrize("within", ["_read_clients", "_watch_workers", "_publish", "_report_state"])
def test_a_scheduler_that_was_stopped_within_a_turn_exits(within: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the loop was, it must not tell the others that it has never been away."""
    system = System(0, Layout(num_frontends=1))
    with system.started():
        service, request = system.engine.service, system.send(system.hub.now)
        assert service is not None
        part = getattr(service, within)

        def stopped() -> None:
            monkeypatch.undo()
            system.hub.sleep(SILENCE + 0.5)
            part()

        monkeypatch.setattr(service, within, stopped)
        exits = f"scheduler status {EXIT_REPLACED}"
        assert system.hub.run(60.0, lambda: system.answered and system.happened[exits] == 1)
        assert request.outcome == "done", request.error
        check_answer(request)
