"""Constrained rows whose masks are late are left out on the simulator, and delay nobody. On a VIRTUAL clock."""

import numpy as np
import pytest

from protocol.codec import unpack
from protocol.membership import Speculation
from protocol.steps import NO_DRAFT, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from services.worker.backends.sim.device.simulated import SimDevice
from services.worker.runner import Output
from tests.unit.worker.plans import (
    GREEDY,
    VOCAB,
    PlanBuilder,
    SlotRequest,
    bits,
    grammar_output,
    planned_drafts,
    prompt,
    ragged,
    result_of,
    sim_runner,
)
from tests.unit.worker.sim_reference import answer
from tests.unit.worker.virtual_clock import VirtualClock

STEP = 0.010
"""Seconds."""


EVEN = bits(*range(0, VOCAB, 2))


def even(_: list[int]) -> np.ndarray:
    return np.frombuffer(EVEN, np.int32)


class Neighbours:
    """A free request and a constrained one, whose tokens are even, in every step.

    Args:
        drafts: drafts that each row proposes.
    """

    def __init__(self, device: SimDevice | None = None, drafts: int = 0, length: int = 6) -> None:
        self.clock, self.drafts = VirtualClock(), drafts
        speculation = Speculation("ngram", drafts) if drafts else None
        make = (lambda: SimDevice(self.clock)) if device is None else (lambda: device)
        self.runner = sim_runner(1e3 * STEP, speculation, make_device=make)
        self.plans = PlanBuilder()
        self.free = self.plans.admit(prompt(1, 6))
        self.bound = self.plans.admit(prompt(2, length))

    def launch(self, *rows: SlotRequest) -> tuple[SchedulerOutput, Output]:
        rows = rows or (self.free, self.bound)
        masked = [self.bound] if self.bound in rows else []
        plan = self.plans.step(*rows, masked=masked, propose=self.drafts)
        self.runner.execute_model(plan)
        return plan, self.runner.sample_tokens(None)

    def masks(self, plan: SchedulerOutput) -> GrammarOutput:
        return grammar_output(plan, [self.bound.slot], EVEN * (1 + self.drafts), [1 + self.drafts])

    def apply(self, launched: tuple[SchedulerOutput, Output]) -> ModelRunnerOutput:
        plan, output = launched
        result, planned = result_of(output), planned_drafts(plan)
        for slot, tokens in ragged(result).items():
            request = self.free if slot == self.free.slot else self.bound
            request.settle(planned[slot], tokens)
        return result

    def assert_answered(self) -> None:
        free, bound = self.free, self.bound
        assert free.outputs == answer(free.prompt, GREEDY, len(free.outputs))
        assert bound.outputs == answer(bound.prompt, GREEDY, len(bound.outputs), even)


def test_a_late_mask_leaves_its_row_out_and_delays_nobody() -> None:
    """Steps follow one another without a gap; the constrained row gets its token with the step of its masks."""
    both = Neighbours()
    began, first, second = both.clock.now, both.launch(), both.launch()
    times = [both.apply(first).times]
    third = both.launch()
    both.runner.add_masks(both.masks(third[0]))
    times += [both.apply(second).times, both.apply(third).times]
    assert [time.forward_began for time in times] == pytest.approx([began + i * STEP for i in range(3)])
    assert [time.sampled for time in times] == pytest.approx([began + i * STEP for i in (1, 2, 3)])
    assert (len(both.free.outputs), len(both.bound.outputs)) == (3, 1)
    both.assert_answered()


@pytest.mark.parametrize("drafts", [0, 3])
def test_masks_in_time_change_nothing(drafts: int) -> None:
    both = Neighbours(drafts=drafts)
    began, times = both.clock.now, []
    launched = both.launch()
    for _ in range(5):
        both.runner.add_masks(both.masks(launched[0]))
        following = both.launch()
        times.append(both.apply(launched).times)
        launched = following
    assert [time.forward_began for time in times] == pytest.approx([began + i * STEP for i in range(5)])
    assert min(len(both.free.outputs), len(both.bound.outputs)) >= 5
    both.assert_answered()


def test_a_row_that_is_left_out_proposes_no_drafts() -> None:
    """The scheduler makes masks for the drafts that it knows."""
    both = Neighbours(drafts=3)
    first, _ = both.launch(), both.launch()
    result = both.apply(first)
    of_free, of_bound = unpack(result.draft_token_ids).reshape(2, 3).tolist()
    assert NO_DRAFT not in of_free
    assert set(of_bound) == {NO_DRAFT}


def test_time_in_which_the_host_is_busy_is_no_time_of_the_device() -> None:
    """The result is read 50 ms late: masks that came meanwhile serve the row, and nobody is delayed."""
    both = Neighbours()
    began, first, second, _ = both.clock.now, both.launch(), both.launch(), both.launch()
    both.clock.now += 0.050
    both.runner.add_masks(both.masks(first[0]))
    times = [both.apply(first).times, both.apply(second).times]
    assert [time.sampled - began for time in times] == pytest.approx([STEP, 2 * STEP])
    assert (len(both.free.outputs), len(both.bound.outputs)) == (2, 1)
    both.assert_answered()


def test_the_launching_thread_never_waits_for_masks() -> None:
    """As many steps are launched as can be in flight, while the masks of the first one are missing."""
    both = Neighbours()
    launched = [both.launch(both.bound) for _ in range(8)]
    for plan, _ in launched:
        both.runner.add_masks(both.masks(plan))
    for each in launched:
        both.apply(each)
    assert len(both.bound.outputs) == 8
    both.assert_answered()
