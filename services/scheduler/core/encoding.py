"""Ends of rows within the encoder's budget of a step.

An encoder computes an item as a whole, in the step of the first row that has a position of it; the workers keep its
output until the request's rows have passed it. Prefixes from the cache can end within an item: the first row of a
request encodes the item that it starts in (encoder budget, docs/invariants.md).
"""

from collections.abc import Sequence

from protocol.media import MediaItem


def encodable(items: Sequence[MediaItem], start: int, end: int, budget: int, is_first: bool) -> tuple[int, int]:
    """Return where a row from `start` to `end` must end, at least `start`, and what it leaves of the budget.

    Args:
        items: of the request, in order.
        is_first: of the request in its slot, which no other row precedes.
    """
    for item in items:
        if item.end <= start or (item.start < start and not is_first):
            continue
        if item.start >= end:
            break
        if item.length > budget:
            return max(item.start, start), budget
        budget -= item.length
    return end, budget
