"""Messages that take longer than a step, and the order of plans and masks."""

from collections import Counter

import pytest

from protocol.sampling import SamplingParams, StructuredOutputParams
from services.scheduler.core.observer import Event, GrammarSent, StepDispatched
from services.scheduler.structured_output import MASK_PATIENCE
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


class MasksBehindPlans:
    """Observer that counts masks by the number of later steps that were dispatched before them."""

    def __init__(self) -> None:
        self.last_step, self.counts = 0, Counter[int]()

    def observe(self, event: Event) -> None:
        if isinstance(event, StepDispatched):
            self.last_step = event.step.step_id
        elif isinstance(event, GrammarSent):
            self.counts[self.last_step - event.message.step_id] += 1


def test_the_next_plan_is_sent_before_masks_that_may_come_too_late() -> None:
    """The loop would wait for masks that are made so fast. The workers here report no times, so none are known to
    arrive before the forward pass in flight ends."""
    layout = Layout(1, mask_seconds=(0.3 * MASK_PATIENCE,), step_seconds=STEP)
    system, masks = System(0, layout), MasksBehindPlans()
    with system.started():
        system.engine.service.engine.observers.add(masks)
        for grammar in (structured(1), None):
            system.send_later(request(system, system.hub.now, grammar))
        assert system.hub.run(60.0, lambda: system.answered)
    assert masks.counts[1] > TOKENS / 2 > masks.counts[0]
