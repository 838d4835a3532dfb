"""Masks on a thread beside the scheduler's loop."""

import select
import threading
import time

import numpy as np
import pytest

from services.scheduler.grammar import masks as masks_module
from services.scheduler.grammar.masks import InlineMaskMaker, MaskThread
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


def test_masks_that_are_made_in_time_are_waited_for() -> None:
    thread = MaskThread()
    thread.submit(1, Automaton(3, -1, VOCAB, ()), [], WORDS)
    thread.wait(10.0, 10.0)
    assert [ticket for ticket, _ in thread.take()] == [1]
    thread.wait(10.0, 10.0)  # nothing is being made
    thread.close()


class WatchedGrammar(Automaton):
    def __init__(self, makers: list[threading.Thread]) -> None:
        super().__init__(3, -1, VOCAB, ())
        self._makers = makers

    def fill(self, mask: np.ndarray) -> None:
        self._makers.append(threading.current_thread())
        super().fill(mask)


class SlowGrammar(WatchedGrammar):
    seconds = 0.0

    def fill(self, mask: np.ndarray) -> None:
        time.sleep(self.seconds)
        super().fill(mask)


@pytest.mark.parametrize(("quick", "beside"), [(60.0, [True, False, False]), (0.0, [True, True, True])])
def test_masks_of_a_quick_grammar_are_made_by_the_thread_that_waits(quick: float, beside: list[bool]) -> None:
    """The first one is made beside it, as nobody knows how long it takes."""
    makers = list[threading.Thread]()
    thread, grammar = MaskThread(quick), WatchedGrammar(makers)
    for ticket in (1, 2, 3):
        thread.submit(ticket, grammar, [], WORDS)
        assert select.select([thread.fileno()], [], [], 10)[0]  # or the loop would sleep before it waits
        thread.wait(10.0, 10.0)
        assert [ticket] == [ticket for ticket, _ in thread.take()]
    thread.close()
    assert [maker is not threading.current_thread() for maker in makers] == beside


def test_quick_masks_hold_the_loop_up_for_a_bounded_time() -> None:
    """A mask for which no time is left goes to the thread, which here makes another one."""
    thread, grammar, held = MaskThread(60.0), Automaton(3, -1, VOCAB, ()), HeldGrammar()
    thread.submit(1, grammar, [], WORDS)
    thread.wait(10.0, 10.0)
    thread.take()
    thread.submit(2, held, [], WORDS)
    thread.submit(3, grammar, [], WORDS)
    thread.wait(0.0, 0.0)
    assert thread.take() == []
    held.released.set()
    thread.wait(10.0, 10.0)
    assert [ticket for ticket, _ in thread.take()] == [2, 3]
    thread.close()


def test_quick_masks_that_become_slow_are_left_to_the_thread() -> None:
    """The first one takes longer than the loop may be held up, and was begun."""
    makers = list[threading.Thread]()
    thread, grammars = MaskThread(60.0), [SlowGrammar(makers) for _ in range(3)]
    for number, (seconds, most) in enumerate([(0.0, 10.0), (0.0, 10.0), (0.05, 0.01)], 1):
        for ticket, grammar in enumerate(grammars, 1):
            grammar.seconds = seconds
            thread.submit(ticket, grammar, [], WORDS)
        thread.wait(10.0, most)
        while len(makers) < 3 * number:
            assert select.select([thread.fileno()], [], [], 10)[0]
            thread.take()
        thread.take()
    thread.close()
    own = threading.current_thread()
    assert [maker is own for maker in makers] == [False] * 3 + [True] * 3 + [True, False, False]


class HeldGrammar(Automaton):
    """A grammar whose mask is made when the test releases it."""

    def __init__(self) -> None:
        super().__init__(3, -1, VOCAB, ())
        self.released = threading.Event()

    def fill(self, mask: np.ndarray) -> None:
        assert self.released.wait(60.0)
        super().fill(mask)


@pytest.mark.parametrize(("most", "longest", "taken"), [(60.0, 60.0, [1, 2]), (0.0, 60.0, [1]), (60.0, 0.0, [1])])
def test_the_others_are_waited_for_while_they_come_fast(
    most: float, longest: float, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the pace of the first one, both are there long before a minute has passed, and not at once."""
    monkeypatch.setattr(masks_module, "LONGEST", longest)
    thread, held = MaskThread(), HeldGrammar()
    thread.submit(1, Automaton(3, -1, VOCAB, ()), [], WORDS)
    assert select.select([thread.fileno()], [], [], 10)[0]
    thread.submit(2, held, [], WORDS)
    release = threading.Timer(0.05 if min(most, longest) else 60.0, held.released.set)
    release.start()
    thread.wait(0.0, most)
    assert [ticket for ticket, _ in thread.take()] == taken
    release.cancel()
    held.released.set()
    thread.close()


def test_it_ends_without_having_made_anything() -> None:
    MaskThread().close()
