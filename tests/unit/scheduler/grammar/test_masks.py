"""Masks on a thread beside the scheduler's loop."""

import select

import numpy as np
import pytest

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
    thread.wait(10.0)
    assert [ticket for ticket, _ in thread.take()] == [1]
    thread.wait(10.0)  # nothing is being made
    thread.close()


def test_it_ends_without_having_made_anything() -> None:
    MaskThread().close()
