"""Prompt lookup against the plainest way to say it."""

import numpy as np
import pytest

from protocol.membership import Speculation
from protocol.steps import NO_DRAFT
from services.worker.backends.native.drafters.base import Advance, Slots, Target
from services.worker.backends.native.drafters.ngram import NgramDrafter
from services.worker.backends.native.state import TokenHistory
from services.worker.batch.slots import SlotTable

SLOTS, LIMIT = 6, 80


def drafter(least: int, most: int, max_model_len: int = 0) -> NgramDrafter:
    wanted = Speculation("ngram", 8, "", "", max_model_len, least, most)
    target = Target(wanted, None, None, None, None, 16, LIMIT)  # type: ignore[arg-type]
    made = NgramDrafter(target)
    history = TokenHistory(SLOTS, LIMIT, 100)
    made.begin(Slots(SlotTable(SLOTS, 16, SLOTS * 5, LIMIT), history, SLOTS * 5))
    history._tokens.fill_(99)  # what is not written belongs to nobody
    return made


def propose(
    made: NgramDrafter, sequences: dict[int, list[int]], k: int, least_chance: float = 0.0
) -> list[list[int]]:
    for slot, tokens in sequences.items():
        made._history._tokens.numpy()[slot, : len(tokens)] = tokens
    slots, lengths = (np.array(x, np.int32) for x in (list(sequences), [len(s) for s in sequences.values()]))
    starts, ones = np.zeros(len(slots), np.int32), np.ones(len(slots), np.bool_)
    advance = Advance(slots, starts, starts, lengths - 1, ones, [], least_chance)
    return made.propose(advance, k).tolist()


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
def test_finds_the_longest_and_then_the_last_match(least: int, most: int, letters: int) -> None:
    rng, made = np.random.default_rng(letters), drafter(least, most)
    found = 0
    for _ in range(40):
        sequences = {slot: rng.integers(0, letters, rng.integers(1, 60)).tolist() for slot in range(SLOTS)}
        k = int(rng.integers(1, 8))
        ours = propose(made, sequences, k)
        assert ours == [expected(tokens, least, most, k) for tokens in sequences.values()]
        found += sum(row[0] != NO_DRAFT for row in ours)
    assert found > 3


def test_a_sequence_that_repeats_goes_on_so() -> None:
    assert propose(drafter(2, 5), {3: [9, 1, 2, 1, 2]}, 5) == [[1, 2, 1, 2, 1]]


def test_a_short_match_is_trusted_less() -> None:
    """Two tokens that match promise the next one with 2/3, the next two with 4/9; three with 3/4, 9/16, 27/64."""
    two, three = [1, 2, 3, 4, 5, 6, 1, 2], [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    for least, lengths in ((0.7, (0, 1)), (0.6, (1, 1)), (0.43, (2, 2)), (0.42, (2, 3)), (0.0, (4, 4))):
        found = propose(drafter(2, 5), {0: two, 1: three}, 4, least)
        assert found == [[3, 4, 5, 6][:n] + [NO_DRAFT] * (4 - n) for n in lengths]


@pytest.mark.parametrize("max_model_len", [0, 12])
def test_nothing_is_proposed_beyond_the_context(max_model_len: int) -> None:
    made, limit = drafter(1, 3, max_model_len), max_model_len or LIMIT
    for missing in range(4):
        assert propose(made, {0: [5] * (limit - missing)}, 3) == [[5] * missing + [NO_DRAFT] * (3 - missing)]


def test_rows_that_do_not_sample_have_no_drafts() -> None:
    made = drafter(1, 3)
    made._history._tokens.numpy()[:2, :20] = 5
    columns = (np.array(x, np.int32) for x in ([0, 1], [1, 1], [0, 0], [10, 15]))
    assert made.propose(Advance(*columns, np.array([False, True])), 2).tolist() == [[5, 5]]
    assert made.propose(
        Advance(np.array([0], np.int32), *(np.ones(1, np.int32),) * 3, np.ones(1, np.bool_)), 0
    ).shape == (1, 0)
