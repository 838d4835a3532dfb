"""Requests that take down the workers whenever they are computed."""

from tests.simulation.whole.client import check_answer
from tests.simulation.whole.device import Poison, Strike
from tests.simulation.whole.network import Speeds
from tests.simulation.whole.system import Layout, System

POISONOUS, OTHERS = 4, 2
CRASHED = -11


def test_many_requests_that_crash_the_workers_do_not_end_the_scheduler() -> None:
    """Each of them crashes its first step, alone, so no step ends between their losses. A second frontend could
    learn of a loss later."""
    system = System(0, Layout(num_frontends=1, speeds=Speeds(latencies=(0.001, 0.2))))
    system.expected_statuses.add(CRASHED)
    with system.started():
        for number in range(POISONOUS + OTHERS):
            request = system.send(system.hub.now, "plain")
            if number < POISONOUS:
                system.poisons[request.name] = Poison(Strike.CRASHES, 0)
                request.is_poison = True
        assert system.hub.run(60.0, lambda: any(request.outcome == "500" for request in system.requests))
        assert not any(frontend.engine.ready for frontend in system.frontends), "the next suspect waits for workers"
        assert system.hub.run(120.0, lambda: system.answered)
        for request in system.requests:
            assert request.outcome == ("500" if request.is_poison else "done"), request.error
            assert not request.is_poison or "it is refused" in request.error
            check_answer(request)
        assert system.happened[f"worker status {CRASHED}"] >= POISONOUS + 2
        assert not any("scheduler status" in name for name in system.happened)
