"""Masks on a thread beside the scheduler's loop."""

import select
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from services.scheduler.grammar import masks as masks_module
from services.scheduler.grammar.masks import InlineMaskMaker, MaskThread, fill_each
from tests.simulation.grammar import Automaton

VOCAB, WORDS = 64, 2


def test_the_thread_makes_what_is_made_inline() -> None:
    grammars = [Automaton(seed, -1, VOCAB, ()) for seed in range(6)]
    drafts: list[list[int]] = [[], [], [3], [4, 5], [], [1, 2, 3]]
    wanted = {
        ticket: InlineMaskMaker().submit(ticket, grammar, ids, WORDS)
        for ticket, (grammar, ids) in enumerate(zip(grammars, drafts, strict=True), 1)
    }
    thread, made = MaskThread(), dict[int, np.ndarray]()
    for ticket, (grammar, ids) in enumerate(zip(grammars, drafts, strict=True), 1):
        assert thread.submit(ticket, grammar, ids, WORDS) is None
    while len(made) < len(grammars):
        assert select.select([thread.fileno()], [], [], 10)[0]
        made.update(thread.take())
    assert thread.take() == []
    thread.close()
    assert made.keys() == wanted.keys()
    for ticket, masks in made.items():
        assert np.array_equal(masks, wanted[ticket])


class BrokenGrammar(Automaton):
    def fill(self, mask: np.ndarray) -> None:
        raise ValueError("no mask")


def test_an_error_of_the_thread_is_raised_by_take() -> None:
    """Otherwise the request would wait forever."""
    thread = MaskThread()
    thread.submit(1, BrokenGrammar(0, -1, VOCAB, ()), [], WORDS)
    assert select.select([thread.fileno()], [], [], 10)[0]
    with pytest.raises(ValueError, match="no mask"):
        thread.take()
    thread.close()


def test_without_a_thread_the_loop_makes_the_masks_and_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    makers: list[threading.Thread] = []
    thread, main = MaskThread(quick=-1.0), threading.current_thread()
    for ticket in (1, 2):
        with monkeypatch.context() as patch:
            if ticket == 1:
                patch.setattr(threading.Thread, "start", refused)
            thread.submit(ticket, WatchedGrammar(makers), [], WORDS)
        assert select.select([thread.fileno()], [], [], 10)[0]
        assert [made for made, _ in thread.take()] == [ticket]
    assert [maker is main for maker in makers] == [True, False]
    thread.close()


class WatchedGrammar(Automaton):
    def __init__(self, makers: list[threading.Thread]) -> None:
        super().__init__(3, -1, VOCAB, ())
        self._makers = makers

    def fill(self, mask: np.ndarray) -> None:
        self._makers.append(threading.current_thread())
        super().fill(mask)


class GrammarClock:
    """Clock in place of the module `time` that only slow grammars move."""

    now = used = 0.0
    is_paused = False
    """Another process has the processor while a mask is made."""

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.used

    process_time = thread_time


class SlowGrammar(Automaton):
    seconds = 0.0
    in_loop = False
    """The thread that submits has made its last mask."""

    def __init__(self, clock: GrammarClock) -> None:
        super().__init__(3, -1, VOCAB, ())
        self._clock = clock

    def fill(self, mask: np.ndarray) -> None:
        self._clock.now += self.seconds
        self._clock.used += 0.0 if self._clock.is_paused else self.seconds
        self.in_loop = threading.current_thread() is threading.main_thread()
        super().fill(mask)


def make(thread: MaskThread, *grammars: Automaton) -> None:
    for ticket, grammar in enumerate(grammars, 1):
        thread.submit(ticket, grammar, [], WORDS)
    made = list[int]()
    while len(made) < len(grammars):
        assert select.select([thread.fileno()], [], [], 10)[0]
        made += [ticket for ticket, _ in thread.take()]
    assert sorted(made) == [*range(1, len(grammars) + 1)]


@pytest.mark.parametrize(
    ("quick", "in_loop", "beside"),
    [(60.0, 60.0, [True, False, False]), (60.0, 0.0, [True, True, True]), (0.0, 60.0, [True, True, True])],
)
def test_few_masks_of_quick_grammars_are_made_in_the_loop(
    quick: float, in_loop: float, beside: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is made beside it, as nobody knows how long it takes."""
    monkeypatch.setattr(masks_module, "IN_LOOP", in_loop)
    makers = list[threading.Thread]()
    thread, grammar = MaskThread(quick=quick), WatchedGrammar(makers)
    for _ in beside:
        make(thread, grammar)
    thread.close()
    assert [maker is not threading.current_thread() for maker in makers] == beside


@pytest.mark.parametrize(("is_paused", "in_loop"), [(False, [True, False, False]), (True, [True, True, True])])
def test_quick_masks_that_become_slow_in_the_loop_are_left_to_the_thread(
    is_paused: bool, in_loop: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one takes longer than the loop may be held up, and was begun. Without the processor no mask is slow."""
    monkeypatch.setattr(masks_module, "IN_LOOP", 1.0)
    monkeypatch.setattr(masks_module, "time", clock := GrammarClock())
    thread, grammars = MaskThread(), [SlowGrammar(clock) for _ in range(3)]
    for seconds in (0.0, 0.0, 2.0):
        for grammar in grammars:
            grammar.seconds = seconds
        clock.is_paused = is_paused and seconds > 0.0
        make(thread, *grammars)
    assert [grammar.in_loop for grammar in grammars] == in_loop
    assert clock.now == 6.0, "each was made once"
    make(thread, *grammars)
    assert [grammar.in_loop for grammar in grammars] == [is_paused] * 3
    thread.close()


@pytest.mark.parametrize(
    ("milliseconds", "is_paused", "sizes"),
    [
        ((0, 0, 1000, 1000, 1000), False, [4, 4, 3]),
        ((0, 0, 0.4, 0.5, 0.7, 1, 1.4, 2, 3), False, [4, 4, 4, 4, 4, 4, 3]),
        ((0, 0, 1000, 1000, 1000), True, [4, 4, 4, 4]),
    ],
    ids=["at once", "step by step", "without the processor"],
)
def test_a_grammar_that_becomes_slow_delays_others_once(
    milliseconds: tuple[float, ...], is_paused: bool, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks that took too long together are made one by one the next time, which finds the slow one."""
    monkeypatch.setattr(masks_module, "IN_LOOP", -1.0)
    monkeypatch.setattr(masks_module, "time", clock := GrammarClock())
    batches = list[int]()

    def fill(grammars: Sequence[Automaton], masks: np.ndarray) -> None:
        batches.append(len(grammars))
        fill_each(grammars, masks)

    thread, grammars = MaskThread(fill), [SlowGrammar(clock) for _ in range(4)]
    for each in milliseconds:
        grammars[0].seconds, clock.is_paused = each / 1000, is_paused
        make(thread, *grammars)
    thread.close()
    assert batches == sizes


def test_it_ends_without_having_made_anything() -> None:
    MaskThread().close()
