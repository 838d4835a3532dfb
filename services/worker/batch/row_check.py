"""The check of a plan's rows against the batch, in few operations, because every step pays for it.

One function over columns, with nothing but arrays and numbers, so that a backend may have a compiled form.
`SlotTable` finds what is wrong with rows that it refuses.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.columns import I32

EMPTY = -1
"""Generation of an empty slot."""
CountRows = Callable[..., bool]
"""`count_rows`, or its compiled form."""


def count_rows(
    slots: I32,
    generations: I32,
    starts: I32,
    counts: I32,
    samples: NDArray[np.bool_],
    drafts: I32,
    generation: I32,
    num_blocks: I32,
    num_tokens: I32,
    computed: I32,
    unsettled: I32,
    row_of: NDArray[Any],
    block_size: int,
    max_model_len: int,
) -> bool:
    """Settle the slots of a plan's rows, check the rows, and count them as launched.

    A slot with rejected drafts or left-out rows is settled: its row starts before the end of what was launched, by at
    most what is unsettled.

    Args:
        slots, generations, starts, counts, samples, drafts: `Rows`
        generation, num_blocks, num_tokens, computed, unsettled: columns of `SlotTable`
        row_of: intp[slots], for the check that no slot has two rows; written before it is read

    Returns: False, if a row contradicts the batch. Then slots are settled, and nothing is counted.
    """
    if len(slots) == 0:
        return True
    if slots.min() < 0 or slots.max() >= len(generation):
        return False
    before, known, open_ends = computed[slots], num_tokens[slots], unsettled[slots]
    if open_ends.any():
        back = before - starts
        back[(before == EMPTY) | (back < 0) | (back > open_ends)] = 0
        before, known, open_ends = before - back, known - back, open_ends - back
        computed[slots], num_tokens[slots], unsettled[slots] = before, known, open_ends
    numbers = np.arange(len(slots))
    row_of[slots] = numbers
    ends = starts + counts
    last = ends - drafts
    fine = row_of[slots] == numbers
    fine &= generation[slots] == generations
    fine &= (before == starts) | (before == EMPTY)
    fine &= last <= known
    fine &= (last == known) == samples
    fine &= ends <= np.minimum(num_blocks[slots] * block_size, max_model_len)
    if not fine.all():
        return False
    computed[slots], num_tokens[slots], unsettled[slots] = ends, known + samples + drafts, open_ends + drafts
    return True
