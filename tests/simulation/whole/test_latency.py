"""Messages that take longer than a step."""

import pytest

from protocol.sampling import SamplingParams, StructuredOutputParams
from tests.simulation.grammar import structured
from tests.simulation.whole.client import ClientRequest, check_answer
from tests.simulation.whole.network import Speeds
from tests.simulation.whole.system import Layout, System

STEP, TOKENS, MOST = 0.02, 60, 17


def request(system: System, at: float, grammar: StructuredOutputParams | None = None) -> ClientRequest:
    number = len(system.requests)
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, seed=number)
    return system.make_request(at, [2 + number] * 9, [params], grammar)


@pytest.mark.parametrize(("depth", "stages", "latency"), [(2, 1, 1.0), (3, 1, 1.5), (6, 1, 1.0), (8, 2, 1.5)])
def test_a_constrained_request_goes_on_beside_others(depth: int, stages: int, latency: float) -> None:
    """Beyond depth two, the next step is sampled before its masks can arrive, again and again."""
    layout = Layout(1, 1, stages, depth=depth, mask_seconds=(0.001,), step_seconds=STEP)
    layout.speeds = Speeds(latencies=(latency * STEP,))
    system = System(0, layout)
    with system.started():
        constrained = request(system, system.hub.now, structured(1))
        system.send_later(constrained)
        while not constrained.outcome:
            system.send_later(request(system, system.hub.now))  # each runs for longer than a second
            system.hub.run(1.0, lambda: bool(constrained.outcome))
            assert len(system.requests) <= MOST, "it waits for the end of the others"
        assert not system.answered, "it has waited for the end of the others"
        assert system.hub.run(60.0, lambda: system.answered)
        for each in system.requests:
            assert each.outcome == "done", each.error
            check_answer(each)
