"""Jobs on a thread of their own: order, errors, and the end of the thread."""

import gc
import threading
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch

from services.worker.backends.native.compute_thread import ComputeThread
from services.worker.runner import RanksLost
from tests.waiting import PATIENCE


def test_jobs_run_in_order_on_one_other_thread() -> None:
    thread, seen = ComputeThread(), []
    jobs = [thread.submit(lambda n=n: (seen.append(n), threading.get_ident())[1]) for n in range(20)]
    threads = {job.result() for job in jobs}
    assert seen == list(range(20))
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert jobs[0].done()


def test_the_system_shows_the_thread_by_its_name() -> None:
    assert ComputeThread().submit(Path("/proc/thread-self/comm").read_text).result() == "compute\n"


def test_an_error_belongs_to_its_job_alone() -> None:
    thread = ComputeThread()
    bad, good = thread.submit(lambda: 1 // 0), thread.submit(torch.is_inference_mode_enabled)
    assert good.result()
    for _ in range(2):  # whoever reads it gets it
        with pytest.raises(ZeroDivisionError):
            bad.result()


def test_an_error_keeps_nothing_of_its_job_but_its_lines() -> None:
    """Without waiting for a collection: the next epoch needs the memory."""

    class State:
        def fail(self) -> None:
            raise ValueError("no memory")

    thread, state = ComputeThread(), State()
    kept = weakref.ref(state)
    failed = thread.submit(lambda own=state: own.fail())  # its frame refers to the state
    error = failed.exception()
    gc.disable()
    try:
        del state
        assert kept() is None
    finally:
        gc.enable()
    assert "in fail" in error.__notes__[0]


def test_after_lost_ranks_nothing_is_computed() -> None:
    """The next step may read tokens that were never received."""

    def lose() -> None:
        raise RanksLost("rank 1 is gone")

    thread, seen = ComputeThread(), []
    jobs = [thread.submit(lose), thread.submit(lambda: seen.append(1))]
    for job in jobs:
        with pytest.raises(RanksLost, match="rank 1 is gone"):
            job.result()
    assert seen == []


def test_closing_refuses_what_has_not_begun() -> None:
    thread, begun, goes_on = ComputeThread(), threading.Event(), threading.Event()
    running = thread.submit(lambda: (begun.set(), goes_on.wait(), "done")[2])
    waiting = thread.submit(lambda: "never")
    begun.wait()
    closing = threading.Thread(target=thread.close)
    closing.start()
    while not thread.closing:
        pass
    goes_on.set()
    closing.join()
    assert running.result() == "done"
    with pytest.raises(RanksLost, match="the epoch has ended"):
        waiting.result()


def test_the_thread_ends_with_its_last_reference_and_keeps_nothing() -> None:
    class State:
        pass

    others = set(threading.enumerate())
    thread, state = ComputeThread(), State()
    kept = weakref.ref(state)
    thread.submit(partial(id, state)).result()
    del state
    gc.collect()
    assert kept() is None
    (own,) = (each for each in {*threading.enumerate()} - others if each.name == "compute")
    del thread
    gc.collect()
    own.join(PATIENCE)
    assert not own.is_alive()
