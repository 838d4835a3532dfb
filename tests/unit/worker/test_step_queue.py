"""The order of forward passes, samplings and masks for a runner that computes on the thread that reads messages."""

import math

import numpy as np
import pytest

from protocol.codec import pack
from protocol.steps import GrammarOutput, ReleaseSlots, SchedulerOutput
from services.worker.backends.mask_inbox import joined
from services.worker.step_queue import QueuedAction, SampleStep, StepQueue
from tests.unit.worker.virtual_clock import VirtualClock


class Queue(StepQueue):
    """A queue on a VIRTUAL clock, whose forward passes take 10 s."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        super().__init__(self.clock)

    def next(self) -> QueuedAction | None:
        queued = super().next()
        if queued is not None and isinstance(queued.action, SchedulerOutput):
            self.clock.now += 10.0
        return queued


def plan(step_id: int, *slots: int, masked: tuple[int, ...] = ()) -> SchedulerOutput:
    empty = b""
    return SchedulerOutput(
        *(1, step_id, pack(slots), empty, empty, empty, empty),
        has_structured_output_requests=bool(masked),
        masked=pack(masked),
    )


def masks(step_id: int, *slots: int) -> GrammarOutput:
    words = np.arange(len(slots), dtype=np.int32)
    return GrammarOutput(1, step_id, pack(slots), memoryview(words.tobytes()))


def queue_with(*messages: SchedulerOutput | GrammarOutput | ReleaseSlots) -> Queue:
    """Return a queue with messages that were read at 1.0, 2.0, and so on."""
    queue = Queue()
    put(queue, *messages)
    return queue


def put(queue: Queue, *messages: SchedulerOutput | GrammarOutput | ReleaseSlots) -> None:
    for number, message in enumerate(messages, start=1):
        queue.put(message, float(number))


def actions(queue: Queue) -> list[object]:
    """Return all actions that can be executed."""
    taken: list[object] = []
    while (queued := queue.next()) is not None:
        taken.append(queued.action)
    return taken


def test_steps_without_constrained_rows_wait_for_nothing() -> None:
    first, second, release = plan(1, 4), plan(2, 4), ReleaseSlots(1, pack([4]))
    queue = queue_with(first, second, release)
    assert queue.next() == QueuedAction(first, 1.0)
    assert not queue.waits
    assert queue.next() == QueuedAction(second, 2.0)
    assert queue.next() == QueuedAction(release, 3.0)
    assert queue.next() is None


def test_a_step_waits_for_all_of_its_masks() -> None:
    step = plan(1, 4, 5, 6, masked=(4, 6))
    queue = queue_with(step)
    assert actions(queue) == [step]
    assert queue.waits
    put(queue, masks(1, 6))
    assert queue.next() is None
    put(queue, masks(1, 4))
    both = joined([masks(1, 6), masks(1, 4)])
    assert queue.next() == QueuedAction(SampleStep(both, step), 1.0)
    assert not queue.waits


def test_a_step_with_rows_of_others_waits_for_a_limited_time() -> None:
    """Two of three rows would lose a forward pass of 10 s. The second plan came before the masks of the first step; a
    row was left out in it, so the third one does not wait."""
    first, second, third, step = plan(1, 9, masked=(9,)), plan(2, 5), *(plan(i, 4, 5, 6, masked=(4, 6)) for i in (3, 4))
    queue = queue_with(first, second, third)
    assert actions(queue)[-2:] == [third, SampleStep(None, third)]
    put(queue, step, masks(4, 4, 6))
    assert actions(queue) == [step, SampleStep(masks(4, 4, 6), step)]
    step = plan(5, 4, 5, 6, masked=(4, 6))
    assert queue.seconds_left == math.inf
    put(queue, step)
    assert actions(queue) == [step]
    assert queue.seconds_left == pytest.approx(20 / 3)
    put(queue, masks(5, 6))
    assert actions(queue) == []
    assert queue.seconds_left == pytest.approx(10 / 3)
    queue.clock.now += queue.seconds_left
    assert actions(queue) == [SampleStep(masks(5, 6), step)]
    assert queue.seconds_left == math.inf


def test_masks_that_were_read_behind_the_later_plan_are_used() -> None:
    step, later = plan(1, 4, 5, masked=(4,)), plan(2, 5)
    queue = queue_with(step)
    queue.next()
    put(queue, later, masks(1, 4))
    assert actions(queue) == [SampleStep(masks(1, 4), step), later]


def test_a_later_step_of_the_same_request_does_not_end_the_wait() -> None:
    step, later, release = plan(1, 4, masked=(4,)), plan(2, 4, masked=(4,)), ReleaseSlots(1, pack([3]))
    queue = queue_with(step, later, release)
    assert actions(queue) == [step]
    put(queue, masks(1, 4))
    assert actions(queue) == [SampleStep(masks(1, 4), step), later]
    put(queue, masks(2, 4))
    assert actions(queue) == [SampleStep(masks(2, 4), later), release]


def test_masks_may_come_before_the_forward_pass() -> None:
    """A later step waits behind one that waits for its masks."""
    step, later = plan(1, 4, masked=(4,)), plan(2, 4, 5, masked=(5,))
    queue = queue_with(step)
    queue.next()
    put(queue, later, masks(2, 5))
    assert actions(queue) == [SampleStep(None, step), later, SampleStep(masks(2, 5), later)]
