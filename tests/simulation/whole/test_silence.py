"""Frontends that seldom run, as on a busy machine: their own pauses are no silence of the scheduler."""

from tests.simulation.whole.client import check_answer
from tests.simulation.whole.system import SILENCE, Layout, System

STOPPED, RUNNING, TIMES = SILENCE - 1.1, 0.3, 10


def test_a_frontend_that_seldom_runs_keeps_its_scheduler() -> None:
    """It stays ready, and submits nothing again."""
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
