"""Gauges that routers read from a frontend."""

from protocol.sampling import SamplingParams
from services.scheduler.service import GAUGE_INTERVAL
from tests.simulation.whole.device import VOCAB
from tests.simulation.whole.system import Layout, System

ON_THE_WAY = 0.05
"""Virtual seconds from the scheduler's decision to the frontend: a turn of the loop, and the network."""


def test_gauges_of_a_frontend_are_those_of_the_scheduler_a_moment_ago() -> None:
    """Eight requests run, two of them later than the others because there are six seats, for less than a second."""
    system = System(3, Layout(num_frontends=1, num_blocks=64, step_seconds=0.02))
    with system.started():
        service, client = system.engine.service, system.frontends[0].engine
        core = service.engine
        assert core is not None
        begin = system.hub.now + 0.5
        for number in range(8):
            prompt = [2 + (number + position) % (VOCAB - 2) for position in range(4)]
            system.send_later(system.make_request(begin, prompt, [SamplingParams(16, seed=number)]))
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        history: list[tuple[float, tuple[float, ...]]] = []
        seen = set()

        def is_old() -> bool:
            """Record what the scheduler has, and return whether the frontend has nothing as new."""
            now, stats = system.hub.now, core.stats()
            history.append((now, tuple(stats[name] for name in names)))
            shown = tuple(client.state.stats[name] for name in names)
            seen.add(shown[:2])
            oldest = now - GAUGE_INTERVAL - ON_THE_WAY
            before = [values for at, values in history if at <= oldest][-1:]
            return shown not in before + [values for at, values in history if at > oldest]

        assert not system.hub.run(3.0, is_old), history[-40:]
        assert system.answered
        assert any(running == 6 and waiting == 2 for running, waiting in seen), seen
        assert client.state.stats["num_requests_running"] == 0
