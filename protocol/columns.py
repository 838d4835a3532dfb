"""Columns of numbers, and reductions of short ones.

A reduction by a NumPy ufunc (`any`, `all`, `sum`, `max`) takes 1.5 us for any column of up to a thousand numbers, which
is most of the time of a step that only decodes. These take a tenth of that.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
_ONES = np.ones(4096, np.int32)


def has_any(column: NDArray[Any]) -> bool:
    """Return whether any element is true, or not zero."""
    return bool(np.count_nonzero(column))


def has_all(column: NDArray[Any]) -> bool:
    """Return whether all elements are true, or not zero."""
    return bool(np.count_nonzero(column) == column.size)


def total(column: NDArray[np.integer[Any]]) -> int:
    """Return the sum of whole numbers, which must fit into int32."""
    if len(column) > len(_ONES):
        return int(column.sum())
    return int(column.dot(_ONES[: len(column)]))


def greatest(column: NDArray[np.integer[Any]], least: int) -> int:
    """Return the largest number, but not less than `least`."""
    return max(int(column[column.argmax()]), least) if len(column) else least


def indices(mask: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return where bool[any] is true."""
    return mask.nonzero()[0]
