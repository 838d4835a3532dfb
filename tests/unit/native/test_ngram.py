"""Prompt lookup against a plain search."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from protocol.steps import NO_DRAFT
from services.worker.backends.native.drafters.base import Advance, DrafterSlots
from services.worker.backends.native.drafters.ngram import NgramProposer
from services.worker.backends.native.token_history import TokenHistory
from services.worker.batch.slots import SlotTable
from tests.unit.native.implementations import IMPLEMENTATIONS, make

SLOTS, LIMIT = 6, 80


class Lookup:
    """A proposer, and the history that it reads."""

    def __init__(self, implementation: str, least: int, most: int, limit: int = LIMIT) -> None:
        kernels = make(implementation)
        self.history = TokenHistory(SLOTS, LIMIT, 100, kernels)
        self.history.tokens.fill_(99)  # what is not written is no request's token
        slots = DrafterSlots(SlotTable(SLOTS, 16, SLOTS * 5, LIMIT), self.history, SLOTS * 5)
        self.proposer = NgramProposer(kernels.drafting, range(least, most + 1), limit, slots)

    def propose(self, sequences: dict[int, list[int]], k: int, min_acceptance: float = 0.0) -> list[list[int]]:
        for slot, tokens in sequences.items():
            self.history.tokens[slot, : len(tokens)] = torch.tensor(tokens)
        slots, lengths = (np.array(x, np.int32) for x in (list(sequences), [len(s) for s in sequences.values()]))
        starts, ones = np.zeros(len(slots), np.int32), np.ones(len(slots), np.bool_)
        advance = Advance(slots, starts, starts, lengths - 1, ones, [], min_acceptance)
        return self.proposer.propose(advance, k).tolist()


NewLookup = Callable[..., Lookup]


@pytest.fixture(params=IMPLEMENTATIONS)
def lookup(request: pytest.FixtureRequest) -> NewLookup:
    return partial(Lookup, request.param)


def expected(tokens: list[int], least: int, most: int, k: int) -> list[int]:
    for size in range(min(most, len(tokens) - 1), least - 1, -1):
        for first in range(len(tokens) - size - 1, -1, -1):
            if tokens[first : first + size] == tokens[-size:]:
                longer = list(tokens)
                for j in range(k):
                    longer.append(longer[first + size + j])
                return longer[len(tokens) :]
    return [NO_DRAFT] * k


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 4), (2, 5), (3, 3)])
@pytest.mark.parametrize("letters", [2, 4, 8])
def test_finds_the_longest_and_then_the_last_match(lookup: NewLookup, least: int, most: int, letters: int) -> None:
    rng, made = np.random.default_rng(letters), lookup(least, most)
    found = 0
    for _ in range(40):
        sequences = {slot: rng.integers(0, letters, rng.integers(1, 60)).tolist() for slot in range(SLOTS)}
        k = int(rng.integers(1, 8))
        ours = made.propose(sequences, k)
        assert ours == [expected(tokens, least, most, k) for tokens in sequences.values()]
        found += sum(row[0] != NO_DRAFT for row in ours)
    assert found > 3


def test_a_sequence_that_repeats_goes_on_so(lookup: NewLookup) -> None:
    assert lookup(2, 5).propose({3: [9, 1, 2, 1, 2]}, 5) == [[1, 2, 1, 2, 1]]


def test_a_short_match_is_trusted_less(lookup: NewLookup) -> None:
    """Two tokens that match promise the next one with 2/3, the next two with 4/9; three with 3/4, 9/16, 27/64."""
    two, three = [1, 2, 3, 4, 5, 6, 1, 2], [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    for least, lengths in ((0.7, (0, 1)), (0.6, (1, 1)), (0.43, (2, 2)), (0.42, (2, 3)), (0.0, (4, 4))):
        found = lookup(2, 5).propose({0: two, 1: three}, 4, least)
        assert found == [[3, 4, 5, 6][:n] + [NO_DRAFT] * (4 - n) for n in lengths]


@pytest.mark.parametrize("max_model_len", [0, 12])
def test_nothing_is_proposed_beyond_the_context(lookup: NewLookup, max_model_len: int) -> None:
    limit = max_model_len or LIMIT
    made = lookup(1, 3, limit)
    for missing in range(4):
        sequences = {1: [5] * limit, 0: [5] * (limit - missing)}
        assert made.propose(sequences, 3) == [[NO_DRAFT] * 3, [5] * missing + [NO_DRAFT] * (3 - missing)]


def test_rows_that_do_not_sample_have_no_drafts(lookup: NewLookup) -> None:
    made = lookup(1, 3)
    made.history.tokens[:2, :20] = 5
    propose = made.proposer.propose
    columns = (np.array(x, np.int32) for x in ([0, 1], [1, 1], [0, 0], [10, 15]))
    assert propose(Advance(*columns, np.array([False, True])), 2).tolist() == [[5, 5]]
    assert propose(Advance(np.array([0], np.int32), *(np.ones(1, np.int32),) * 3, np.ones(1, np.bool_)), 0).shape == (
        1,
        0,
    )
