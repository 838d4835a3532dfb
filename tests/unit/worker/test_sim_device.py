"""Work of the simulated device that is queued behind a wait for masks. On a VIRTUAL clock."""

import pytest

from services.worker.backends.sim.device.simulated import SimDevice, SimEvent
from tests.unit.worker.virtual_clock import VirtualClock

STEP = 0.010
"""Seconds."""


class QueuedSteps:
    """Steps of a device, each a forward pass, a wait for masks and a sampling; what was done is in `log`."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.began = self.clock.now
        self.device = SimDevice(self.clock)
        self.log: list[tuple[str, float]] = []
        """Work and the time at which it was done: seconds from the beginning."""

    def launch(self, name: str) -> SimEvent:
        self.device.launch(lambda: self._done(f"forward {name}"), STEP)
        self.device.wait_for_masks(self._take)
        return self.device.launch(lambda: self._done(f"sample {name}"), 0.0)

    def _take(self) -> float:
        return self.began

    def _done(self, what: str) -> None:
        self.log.append((what, self.clock.now - self.began))


def test_the_next_forward_pass_is_computed_while_the_time_of_a_step_passes() -> None:
    """Its masks are not waited for: the result of the step is due before."""
    steps = QueuedSteps()
    first, second = steps.launch("1"), steps.launch("2")
    first.synchronize()
    assert steps.log == [("forward 1", 0.0), ("sample 1", 0.0), ("forward 2", 0.0)]
    assert first.ended - steps.began == pytest.approx(STEP)
    second.synchronize()
    assert steps.log[3:] == [("sample 2", pytest.approx(STEP))]
    assert second.ended - steps.began == pytest.approx(2 * STEP)


def test_a_result_that_is_due_waits_for_no_further_work() -> None:
    steps = QueuedSteps()
    first, second = steps.launch("1"), steps.launch("2")
    steps.clock.now += STEP
    first.synchronize()
    assert [what for what, _ in steps.log] == ["forward 1", "sample 1"]
    second.synchronize()
    assert second.ended - steps.began == pytest.approx(2 * STEP)


def test_work_that_waits_for_other_ranks_is_not_done_ahead() -> None:
    steps = QueuedSteps()
    first, asked = steps.launch("1"), []

    def inputs() -> float:
        asked.append(steps.clock.now)
        return 0.0

    second = steps.device.launch(lambda: None, STEP, inputs)
    first.synchronize()
    assert not asked
    second.synchronize()
    assert asked == [pytest.approx(steps.began + STEP)]
