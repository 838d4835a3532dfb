"""Processes that do not run for a while, as on a busy machine or after SIGSTOP."""

import pytest

from services.scheduler.service import EXIT_REPLACED
from tests.simulation.whole.client import check_answer
from tests.simulation.whole.system import SILENCE, Layout, System

STOPPED, RUNNING, TIMES = SILENCE - 1.1, 0.3, 10


def test_a_frontend_that_seldom_runs_keeps_its_scheduler() -> None:
    """Its own pauses are no silence of the scheduler: it stays ready, and submits nothing again."""
    system = System(0, Layout(num_frontends=1))
    with system.libraries():
        system.start()
        assert system.hub.run(30.0, lambda: system.serving)
        frontend = system.frontends[0]
        for number in range(TIMES):
            request = system.draw_request(system.hub.now + number)
            request.leaves_after = None
            system.send_later(request)
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


@pytest.mark.parametrize("within", ["_read_clients", "_watch_workers", "_publish", "_report_state"])
def test_a_scheduler_that_was_stopped_within_a_turn_exits(
    within: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the loop was, it must not tell the others that it has never been away."""
    system = System(0, Layout(num_frontends=1))
    with system.libraries():
        system.start()
        assert system.hub.run(30.0, lambda: system.serving)
        service, request = system.service, system.draw_request(system.hub.now)
        assert service is not None
        request.leaves_after = None
        system.send_later(request)
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
