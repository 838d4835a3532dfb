"""The host-buffer rule (docs/invariants.md): a set of buffers is reused only after the copies that read it have
ended."""

import threading

import pytest

from services.config import SchedulerConfig
from services.worker.batch.staging import MAX_STEPS_IN_FLIGHT, HostRing


class ManualEvent:
    """An event that passes when the test sets `passed`."""

    def __init__(self) -> None:
        self.passed, self.waited_for = threading.Event(), threading.Event()

    def synchronize(self) -> None:
        self.waited_for.set()
        assert self.passed.wait(60)


def ring(size: int) -> HostRing[list[int]]:
    return HostRing(list, size)


def test_sets_are_used_in_turn_without_waiting_while_one_is_free() -> None:
    buffers = ring(3)
    events = [ManualEvent() for _ in range(3)]
    seen = []
    for event in events:
        seen.append(buffers.acquire())
        buffers.release(event)
    assert len({id(s) for s in seen}) == 3
    assert not any(event.waited_for.is_set() for event in events)


def test_acquire_waits_for_a_set_that_is_still_read() -> None:
    buffers, event = ring(1), ManualEvent()
    first = buffers.acquire()
    buffers.release(event)
    got: list[list[int]] = []
    thread = threading.Thread(target=lambda: got.append(buffers.acquire()))
    thread.start()
    assert event.waited_for.wait(60)
    assert not got
    event.passed.set()
    thread.join(60)
    assert got[0] is first


def test_a_second_acquire_needs_a_release() -> None:
    buffers = ring(2)
    buffers.acquire()
    with pytest.raises(RuntimeError, match="never released"):
        buffers.acquire()


def test_release_needs_acquire() -> None:
    with pytest.raises(RuntimeError, match="without acquire"):
        ring(2).release(None)


def test_the_ring_has_a_set_for_every_step_of_the_deepest_batch_queue() -> None:
    SchedulerConfig(batch_queue_depth=MAX_STEPS_IN_FLIGHT)
    with pytest.raises(ValueError, match="batch_queue_depth"):
        SchedulerConfig(batch_queue_depth=MAX_STEPS_IN_FLIGHT + 1)
