"""A slot is assigned with every column reset, retired behind its fence, and assigned again."""

import numpy as np

from services.scheduler.core.slots import DROP, SlotColumns
from tests.simulation.grammar import Automaton
from tests.simulation.requests import request


def test_the_next_owner_sees_no_column_of_the_last() -> None:
    slots, fresh = SlotColumns(1, 32), SlotColumns(1, 32)
    slots.assign(request([1, 2, 3], 1, max_tokens=4, min_tokens=3, stop_token_ids=(5, 6, 7)), 32)
    slots.retire(0, DROP)
    slots.release(0)
    columns = {name for name, column in vars(slots).items() if isinstance(column, np.ndarray) and column.ndim == 1}
    columns -= {"generation", "next_unread"}  # counts the owners; only set with windows, when blocks are
    for name in columns:
        getattr(slots, name)[0] = 9
    for each in (slots, fresh):
        each.assign(request([4], 2, eos_token_ids=(2,)), 32)
    assert [getattr(slots, name)[0] for name in columns] == [getattr(fresh, name)[0] for name in columns], columns
    assert slots.stop_ids[0].tolist() == [2]
    assert slots.generation[0] == 2


def test_many_stop_tokens_cost_other_steps_nothing_once_their_request_has_left() -> None:
    slots = SlotColumns(2, 32)
    slots.assign(request([1], 1, stop_token_ids=(7, 8)), 32)
    wide = slots.assign(request([1], 2, stop_token_ids=tuple(range(1000))), 32)
    assert slots.stop_ids.shape == (2, 1000)
    slots.retire(wide, DROP)
    slots.release(wide)
    assert slots.stop_ids.shape == (2, 2)
    assert slots.stop_ids[0].tolist() == [7, 8]
    slots.assign(request([1], 3, eos_token_ids=(2,)), 32)
    assert slots.stop_ids[wide].tolist() == [2, -1]


def test_under_a_grammar_a_stop_token_counts_at_once_whatever_min_tokens_says() -> None:
    """It is sampled before `min_tokens` only if the grammar allows nothing else, so the text is complete."""
    slots = SlotColumns(2, 32)
    free, constrained = (request([1, 2], number, max_tokens=8, min_tokens=6, eos_token_ids=(2,)) for number in (1, 2))
    constrained.grammar = Automaton(1, -1, 64, (2,))
    assert slots.stops_from[slots.assign(free, 32)] == 8
    assert slots.stops_from[slots.assign(constrained, 32)] == 2
