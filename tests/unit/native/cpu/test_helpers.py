"""Threads that share kernels: every item is computed once, however many threads come, and errors are raised."""

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from numba import carray
from numba.core.registry import cpu_target

from services.worker.kernels.cpu import thread_team
from services.worker.kernels.cpu.compiled import raw
from services.worker.kernels.cpu.helpers import Helpers, share
from services.worker.kernels.cpu.recording import Sequence
from services.worker.kernels.cpu.thread_team import Kernel, arguments, helper_state, set_num_threads, take
from services.worker.service import hide_exits

BLOCK = arguments(("out", np.int64), ("met", np.int64), ("wanted", np.int64))


def count(address):  # type: ignore[no-untyped-def]
    """Adds one to each item's number, then waits until so many items were begun as are `wanted`. Item 4999 fails."""
    a = carray(raw.pointer(address), 1, BLOCK)[0]
    while True:
        item = take(address)
        if item >= a.items:
            break
        raw.i64_at(a.out + item * 8, 1)[0] += 1
        raw.fetch_add(a.met, 1 + 0 // (item - 4999))
        while raw.load_i64(a.met) < a.wanted:
            pass


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return Kernel(count, BLOCK, cost=1)


@pytest.fixture(autouse=True)
def alone_afterwards() -> Iterator[None]:
    yield
    set_num_threads(1)


def run(kernel: Kernel, items: int, wanted: int = 0) -> list[int]:
    out, met = np.zeros(items, np.int64), np.zeros(1, np.int64)
    kernel.run(items, (out.ctypes.data, met.ctypes.data, wanted))
    return out.tolist()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_item_is_computed_once(kernel: Kernel, threads: int) -> None:
    set_num_threads(threads)
    for items in [*range(2, 40), 1000] * 20:
        assert run(kernel, items) == [1] * items


@pytest.mark.parametrize("threads", [2, 4])
def test_helpers_take_part(kernel: Kernel, threads: int) -> None:
    """As many items as threads, of which each waits until all were begun."""
    set_num_threads(threads)
    for _ in range(20):
        assert run(kernel, threads, wanted=threads) == [1] * threads


@pytest.mark.parametrize("threads", [1, 2])
def test_what_a_kernel_raises_is_raised_once_on_any_thread(
    kernel: Kernel, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", others.append)
    thread_team.collect_failures()
    hide_exits()  # as a worker does that has kernels already
    sys.unraisablehook(SimpleNamespace(exc_type=ValueError, exc_value=ValueError(), object=cpu_target))
    assert len(others) == 1, "of a finaliser"
    set_num_threads(threads)
    with pytest.raises(ZeroDivisionError) as raised:
        run(kernel, 5000, wanted=threads)
    assert raised.value.__notes__ == ["raised in <Numba C callback 'count'>, or in a kernel that it ran"]
    assert run(kernel, 9) == [1] * 9
    sequence, rows, out, met = Sequence(), np.ones(1, np.int64), np.zeros(5000, np.int64), np.zeros(1, np.int64)
    kernel.fill((out.ctypes.data, met.ctypes.data, 0))
    sequence.add(kernel, rows, items=5000, chunk=1, rows_field=0)
    with pytest.raises(ZeroDivisionError):
        sequence.run()


def test_an_error_is_raised_although_another_thread_runs_a_kernel_first(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread_team.collect_failures()
    collect, other = sys.unraisablehook, threading.Thread(target=run, args=(kernel.again(), 9))

    def collect_and_wait(unraisable: object) -> None:
        collect(unraisable)
        other.start()
        other.join()

    monkeypatch.setattr(sys, "unraisablehook", collect_and_wait)
    with pytest.raises(ZeroDivisionError):
        run(kernel, 5000)


def test_a_kernel_does_not_wait_for_absent_helpers(kernel: Kernel) -> None:
    nobody = Helpers(0)
    own, out, met = kernel.again(), np.zeros(9, np.int64), np.zeros(1, np.int64)
    own.fill((out.ctypes.data, met.ctypes.data, 0), items=9)
    share(own.function, own.address, nobody.state)
    assert out.tolist() == [1] * 9


def test_each_calling_thread_has_helpers_of_its_own(kernel: Kernel) -> None:
    set_num_threads(2)
    states: dict[int, int] = {}
    wrong: list[int] = []
    together = threading.Barrier(3)

    def work(number: int) -> None:
        own = kernel.again()
        states[number] = helper_state()
        together.wait(60)
        wrong.extend(items for items in [*range(2, 40)] * 20 if run(own, items) != [1] * items)

    callers = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
    assert len(set(states.values())) == 3


@pytest.mark.parametrize(("items", "helpers"), [(7, 0), (8, 2)])
def test_helpers_come_for_what_is_worth_it_and_leave_with_their_caller(items: int, helpers: int) -> None:
    def there() -> int:
        return sum(thread.name == "kernels" for thread in threading.enumerate())

    before = there()
    seen: list[int] = []

    def work() -> None:
        run(Kernel(count, BLOCK, cost=4), items)
        seen.append(there() - before)

    set_num_threads(3)
    caller = threading.Thread(target=work)
    caller.start()
    caller.join()
    assert seen == [helpers]
    assert there() == before
