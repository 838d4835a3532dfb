# mypy: disable-error-code="no-untyped-def"
"""The rows of a step: from the host's columns to the buffers of the forward pass, in one launch."""

import triton
import triton.language as tl

COUNTS = ["tokens", "tiles_number", "sampled_number", "padded_tokens", "padded_tiles", "padded_sampled"]
"""Numbers that differ from step to step: without this, Triton compiles variants for 1 and for multiples of 16."""


@triton.jit(do_not_specialize=COUNTS)
def layout_kernel(
    token_slots,  # int32[tokens], columns of the host
    token_positions,
    planned_tiles,  # int32[tiles, 4]
    planned_samples,  # int32[sampled]
    history,  # int32[slots, limit]; read if `reads`
    ids,  # the buffers of the step, written
    slots,
    positions,
    tiles,
    sampled,
    tokens,
    tiles_number,
    sampled_number,
    padded_tokens,  # rows that are written, padding rows included
    padded_tiles,
    padded_sampled,
    limit,
    reads: tl.constexpr,
    at_once: tl.constexpr,
):
    at = tl.program_id(0) * at_once + tl.arange(0, at_once)
    is_token, is_row = at < tokens, at < padded_tokens
    slot = tl.load(token_slots + at, mask=is_token, other=-1)
    position = tl.load(token_positions + at, mask=is_token, other=0)
    tl.store(slots + at, slot, mask=is_row)
    tl.store(positions + at, position, mask=is_row)
    if reads:
        place = slot.to(tl.int64) * limit + position
        token = tl.load(history + place, mask=is_token & (position < limit), other=0)
        tl.store(ids + at, token, mask=is_row)
    column = tl.load(planned_tiles + at, mask=at < 4 * tiles_number, other=0)
    tl.store(tiles + at, column, mask=at < 4 * padded_tiles)
    index = tl.load(planned_samples + at, mask=at < sampled_number, other=0)
    tl.store(sampled + at, index, mask=at < padded_sampled)
