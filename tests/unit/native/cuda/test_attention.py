"""Paged attention under Triton's interpreter against the reference: blocks, windows, groups, padding, splits."""

from functools import partial

import pytest
import torch

from services.worker.kernels.cuda.attention import PagedAttention
from services.worker.kernels.interface.kernels import Kernels
from tests.unit.native.attention_cases import AttentionCase, PagedTokens
from tests.unit.native.cuda.kernel_cases import Accuracy, KernelMaker

F32 = torch.float32
CONTEXT = 90
MIXED = [([0, 0, 0], [66, 1, 0]), ([66, 1, 0], [1, 12, 9]), ([67, 13, 9], [1, 1, 1])]
"""Starts and counts of each slot; a count of 0 is no row. A tile has 64 tokens."""
SHORT = [([0, 0, 0], [26, 1, 0]), ([26, 1, 0], [1, 12, 9]), ([27, 13, 9], [1, 1, 1])]
CASES = [
    AttentionCase(4, 2, 16, 16),
    AttentionCase(3, 3, 24, 5),
    AttentionCase(6, 2, 40, 16, window=17),
    AttentionCase(7, 1, 8, 3, window=7, normed=True),
    AttentionCase(2, 1, 128, 32, window=1),
    AttentionCase(1, 1, 16, 1, normed=True),
    AttentionCase(20, 1, 16, 64, window=60),
    AttentionCase(6, 2, 20, 16, all_heads=True, turns=False),
    AttentionCase(8, 2, 16, 16, window=19, sinks=True),
]
SERVED = [AttentionCase(8, 2, 64, 16), AttentionCase(8, 2, 128, 16)]
"""Groups and heads of Llama 3, whose programs are the largest ones."""
IN_SOAK = [(CASES[0], "float32"), (CASES[2], "float32"), (SERVED[0], "half")]
"""Cells without anything that others lack; a GPU runs them too."""
OF_WRITING = (CASES[3], CASES[4], CASES[5], CASES[7])
"""These differ in how keys are written and blocks end, which a second tile does not change."""


def both(
    make: KernelMaker, case: AttentionCase, dtype: torch.dtype, processors: int | None = None
) -> tuple[PagedTokens, PagedTokens]:
    """`processors`: multiprocessors of the device, more than the interpreter has."""
    divided = partial(PagedAttention, activations=dtype, processors=processors)
    return (
        PagedTokens(make(dtype), case, CONTEXT, dtype, dtype, divided if processors else None),
        PagedTokens(Kernels(dtype), case, CONTEXT, dtype, dtype),
    )


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, "float32") for case in (CASES[1], *CASES[3:])),
        *((case, "half") for case in (CASES[2], SERVED[1])),
        *(pytest.param(*cell, marks=pytest.mark.soak) for cell in IN_SOAK),
    ],
    ids=str,
    indirect=["dtype"],
)
def test_equals_the_reference(make: KernelMaker, accuracy: Accuracy, case: AttentionCase, dtype: torch.dtype) -> None:
    """Chunks of one and several tiles, decode rows among them, and decode rows alone."""
    ours, theirs = both(make, case, dtype)
    for step in SHORT if case in OF_WRITING else MIXED:
        torch.testing.assert_close(ours.step(*step), theirs.step(*step), **accuracy.attention[dtype])


@pytest.mark.parametrize("case", [CASES[0], pytest.param(CASES[2], marks=pytest.mark.soak), CASES[-1]], ids=str)
def test_keys_are_divided_among_programs(make: KernelMaker, case: AttentionCase) -> None:
    """Also where a part has no keys, and for decode rows with drafts."""
    ours, theirs = both(make, case, F32, processors=4)
    steps = [*MIXED, ([68, 14, 10], [5, 0, 1]), ([73, 0, 0], [1, 0, 0])]
    for step in steps:
        torch.testing.assert_close(ours.step(*step), theirs.step(*step), atol=3e-6, rtol=1e-5)


def test_padding_rows_write_nothing(make: KernelMaker, accuracy: Accuracy) -> None:
    ours, theirs = both(make, CASES[0], F32)
    ours.step(*SHORT[0])
    theirs.step(*SHORT[0])
    before = ours.cache.keys.clone()
    expected = theirs.step([26, 1, 0], [1, 1, 0])
    padded = ours.step([26, 1, 0], [1, 1, 0], padding=6)
    torch.testing.assert_close(padded, expected, **accuracy.attention[F32])
    changed = (ours.cache.keys.nan_to_num(7.0) != before.nan_to_num(7.0)).any(-1)
    assert int(changed.sum()) == 2 * CASES[0].kv_heads


def test_no_rows(make: KernelMaker) -> None:
    ours, _ = both(make, CASES[0], F32)
    assert len(ours.step([0, 0, 0], [0, 0, 0])) == 0
