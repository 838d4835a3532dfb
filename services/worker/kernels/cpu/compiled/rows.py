"""Rows of several tokens each, back to back. NumPy would need several calls for each: slow for few rows."""

from numba import njit, types

from services.worker.batch.row_check import EMPTY
from services.worker.kernels.interface import row_loops

_GIVEN = types.Array(types.int32, 1, "A", readonly=True)
_MADE = types.Array(types.int32, 1, "C")
_KEPT = types.Array(types.int32, 2, "C")
_MASK = types.Array(types.boolean, 1, "C")
_BITS = types.Array(types.boolean, 1, "A", readonly=True)
_FLOATS = types.Array(types.float32, 1, "C")
_INDICES = types.Array(types.intp, 1, "C")

write_tokens = njit(types.void(_KEPT, _GIVEN, _GIVEN, _GIVEN), cache=True)(row_loops.write_tokens)
lay_out = njit(
    types.UniTuple(types.int64, 2)(
        *(_GIVEN,) * 3, _BITS, _GIVEN, _KEPT, *(types.int64,) * 2, *(_MADE,) * 3, _KEPT, _MADE
    ),
    cache=True,
)(row_loops.lay_out)
verify = njit(types.Tuple((_MADE, _MADE, _MASK))(*(_GIVEN,) * 5, _KEPT), cache=True)(row_loops.verify)
lay_out_drafts = njit(
    types.UniTuple(types.int64, 2)(
        *(*(_GIVEN,) * 3, _BITS, _MADE, _FLOATS, _KEPT, *(types.int64,) * 3, types.float64),
        *(*(_MADE,) * 6, _FLOATS, _FLOATS, _KEPT),
    ),
    cache=True,
)(row_loops.lay_out_drafts)


@njit(types.boolean(*(_GIVEN,) * 4, _BITS, _GIVEN, *(_MADE,) * 5, _INDICES, *(types.int64,) * 2), cache=True)
def count_rows(  # type: ignore[no-untyped-def]
    slots, generations, starts, counts, samples, drafts, generation, num_blocks, num_tokens, computed, unsettled,
    row_of, block_size, max_model_len
):  # fmt: skip
    """See `row_check.count_rows`. Not the same code: numba compiles operations of whole arrays for seven seconds."""
    for slot in slots:
        if not 0 <= slot < len(generation):
            return False
    for row in range(len(slots)):
        slot = slots[row]
        row_of[slot], back = row, computed[slot] - starts[row]
        if computed[slot] != EMPTY and 0 < back <= unsettled[slot]:
            for column in (computed, num_tokens, unsettled):
                column[slot] -= back
    for row in range(len(slots)):
        slot, end = slots[row], starts[row] + counts[row]
        last = end - drafts[row]
        if row_of[slot] != row or generation[slot] != generations[row]:
            return False
        if computed[slot] != starts[row] and computed[slot] != EMPTY:
            return False
        if last > num_tokens[slot] or (last == num_tokens[slot]) != samples[row]:
            return False
        if end > min(num_blocks[slot] * block_size, max_model_len):
            return False
    for row in range(len(slots)):
        slot = slots[row]
        computed[slot] = starts[row] + counts[row]
        num_tokens[slot] += samples[row] + drafts[row]
        unsettled[slot] += drafts[row]
    return True


@njit(types.Tuple((*(_MADE,) * 3, types.int64))(*(_GIVEN,) * 4, _MADE, _MADE, _KEPT, _KEPT), cache=True)
def settle(slots, starts, counts, drafts, frontier, proposed, tokens, history):  # type: ignore[no-untyped-def]
    """See `RowKernels.settle`. Arguments: the columns of the rows, of `SlotDrafts`, and the history.

    Return the columns that may have changed, and -1 or the row that is planned before its frontier. Tokens beyond the
    history's limit are not written, because no step reads them."""
    true_starts, true_counts, true_drafts = starts.copy(), counts.copy(), drafts.copy()
    for row in range(len(slots)):
        if frontier[slots[row]] > starts[row]:
            return true_starts, true_counts, true_drafts, row
    for row in range(len(slots)):
        slot = slots[row]
        start = frontier[slot] if frontier[slot] >= 0 else starts[row]
        number = min(drafts[row], proposed[slot])
        count = counts[row] - drafts[row] + number
        true_starts[row], true_counts[row], true_drafts[row] = start, count, number
        proposed[slot], frontier[slot] = 0, start + count
        first = start + count - number
        for i in range(min(number, history.shape[1] - first)):
            history[slot, first + i] = tokens[slot, i]
    return true_starts, true_counts, true_drafts, -1
