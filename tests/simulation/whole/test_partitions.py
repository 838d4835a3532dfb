"""Connections that live, but on which nothing arrives, in one direction: readiness, and what recovers."""

from collections.abc import Callable

import pytest

from tests.simulation.whole.client import check_answer
from tests.simulation.whole.network import SimulatedConnection
from tests.simulation.whole.system import SILENCE, Layout, System

NOTICED = SILENCE + 2.1
"""Virtual seconds: the limit and two signs of life."""
NOTICED_IN_A_STEP = 8.0 + 1.0
"""Virtual seconds: the limit of a step whose size was not measured, and one check."""


def connections_of_a_worker(system: System) -> list[SimulatedConnection]:
    """Return the connections for plans and for results of one worker, in this order."""
    process = system.engine.workers[0].process
    connections = system.network.bound[system.engine.config.worker_endpoint].connections.values()
    plans, results = (c for c in connections if c.dealer.process is process)
    return [plans, results]


def frontend_to_scheduler(system: System) -> None:
    system.network.partition(system.frontends[0].process.name, system.engine.scheduler.name)


def scheduler_to_frontend(system: System) -> None:
    system.network.partition(system.engine.scheduler.name, system.frontends[0].process.name)


def scheduler_to_worker(system: System) -> None:
    system.network.partition(system.engine.scheduler.name, system.engine.workers[0].process.name)


def worker_to_scheduler(system: System) -> None:
    system.network.partition(system.engine.workers[0].process.name, system.engine.scheduler.name)


def plans_to_worker(system: System) -> None:
    connections_of_a_worker(system)[0].down.is_held = True


def results_of_worker(system: System) -> None:
    connections_of_a_worker(system)[1].up.is_held = True


CUTS = [
    frontend_to_scheduler,
    scheduler_to_frontend,
    scheduler_to_worker,
    worker_to_scheduler,
    plans_to_worker,
    results_of_worker,
]


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_an_engine_that_is_cut_off_in_one_direction_is_not_ready(cut: Callable[[System], None], busy: bool) -> None:
    """Nothing tells so but answers that are missing: no connection breaks. A stream goes on as if nothing was."""
    system = System(5, Layout(num_frontends=1, tensor_parallel=2))
    with system.started():
        engine = system.frontends[0].engine
        requests = [system.send(system.hub.now + 0.1 * number) for number in range(6 if busy else 0)]
        system.hub.run(0.3)
        cut(system)
        assert system.hub.run(NOTICED_IN_A_STEP if busy else NOTICED, lambda: not engine.ready)
        system.network.heal()
        assert system.hub.run(60.0, lambda: system.answered and system.quiet)
        for request in requests:
            assert request.outcome == "done", request.error
            check_answer(request)


def test_a_frontend_that_no_sign_of_life_has_reached_is_not_ready() -> None:
    """Without one it has no lease, so the scheduler ends nothing, and its states keep arriving."""
    system = System(5, Layout(num_frontends=1))
    with system.libraries():
        system.start()
        assert system.hub.run(30.0, lambda: bool(system.frontends) and system.frontends[0].engine.ready)
        service = system.engine.service
        assert service is not None
        frontend_to_scheduler(system)
        for frontend in service.frontends.peers.values():
            frontend.heard = None
        assert system.hub.run(NOTICED, lambda: not system.frontends[0].engine.ready)


def test_an_engine_without_a_fault_stays_ready() -> None:
    system = System(5, Layout(num_frontends=2, tensor_parallel=2))
    with system.started():
        for number in range(20):
            system.send(system.hub.now + number)
        assert not system.hub.run(30.0, lambda: not all(frontend.engine.ready for frontend in system.frontends))
        assert system.answered
