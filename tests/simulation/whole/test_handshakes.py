"""Connections that are lost, and schedulers that stop, while a worker makes its two connections."""

import pytest

from protocol.handshake import Hello
from protocol.transport import Server
from services.scheduler.io.workers import RESULTS
from tests.simulation.whole.network import Speeds
from tests.simulation.whole.system import Layout, System

SLOW = Layout(num_frontends=1, speeds=Speeds(latencies=(0.05,)))


@pytest.mark.parametrize("role", ["worker", RESULTS])
def test_a_worker_whose_connection_is_lost_before_the_welcome_makes_both_again(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler has accepted the connection, and does not know yet that it is lost."""
    system = System(0, SLOW)
    receive = Server.receive

    def lost(self: Server) -> tuple[bytes, Hello | bytes] | None:
        received = receive(self)
        if received is not None and isinstance(hello := received[1], Hello) and hello.role == role:
            monkeypatch.undo()
            network = system.network
            (router,) = (each for each in network.bound.values() if received[0] in each.connections)
            router.connections[received[0]].reset(0.0, 1.0)
        return received

    monkeypatch.setattr(Server, "receive", lost)
    with system.libraries():
        system.engine.start_scheduler()
        system.start_frontend()
        system.engine.start_worker()
        assert system.hub.run(10.0, lambda: system.serving)
        assert len(system.engine.workers) == 1
        assert system.engine.workers[0].process.name == "worker1"
        system.hub.run(2.0)
        assert system.serving


def test_a_worker_in_the_handshake_of_a_stopped_scheduler_finds_the_next_one() -> None:
    system = System(0, SLOW)
    with system.libraries():
        system.engine.start_scheduler()
        system.engine.start_worker()
        assert system.hub.run(1.0, lambda: any(router.connections for router in system.network.bound.values()))
        stopped = system.engine.scheduler
        stopped.stop()
        system.engine.start_scheduler()
        system.start_frontend()
        assert system.hub.run(10.0, lambda: system.serving)
