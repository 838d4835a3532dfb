"""Paged attention under Triton's interpreter against the reference: blocks, windows, groups, padding, splits."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from services.worker.backends.native.kernels.cuda.attention import PagedAttention
from services.worker.backends.native.kernels.interface.attention import AttentionShape
from services.worker.backends.native.kernels.interface.kernels import Kernels
from services.worker.backends.native.kernels.interface.kv_cache import CacheShape
from services.worker.backends.native.kernels.interface.rows import BatchTensors
from services.worker.backends.native.kernels.reference.kernels import ReferenceKernels
from services.worker.batch.slots import Rows
from tests.unit.native.cuda.kernel_cases import Accuracy, KernelMaker

F32 = torch.float32
SLOTS, CONTEXT = 3, 90
MIXED = [([0, 0, 0], [66, 1, 0]), ([66, 1, 0], [1, 12, 9]), ([67, 13, 9], [1, 1, 1])]
"""Starts and counts of each slot; a count of 0 is no row."""


@dataclass
class PagedCase:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int = 0
    normed: bool = False
    """Queries and keys are normalised head by head."""


CASES = [
    PagedCase(4, 2, 16, 16),
    PagedCase(3, 3, 24, 5),
    PagedCase(6, 2, 40, 16, window=17),
    PagedCase(7, 1, 8, 3, window=7, normed=True),
    PagedCase(2, 1, 128, 32, window=1),
    PagedCase(1, 1, 16, 1, normed=True),
    PagedCase(20, 1, 16, 64, window=60),
]


class PagedTokens:
    """Random tokens of three sequences, computed by one implementation over a cache of poisoned memory."""

    def __init__(self, kernels: Kernels, case: PagedCase, dtype: torch.dtype, processors: int = 1) -> None:
        torch.manual_seed(0)
        self.kernels, self.case, self.dtype = kernels, case, dtype
        width = (case.heads + 2 * case.kv_heads) * case.head_dim
        self.qkv = torch.randn(SLOTS, CONTEXT, width).to(dtype)
        blocks = -(-CONTEXT // case.block_size)
        total = SLOTS * blocks + 2
        table = torch.randperm(total, dtype=torch.int32)[: SLOTS * blocks].view(SLOTS, blocks)
        norms = torch.rand(case.head_dim) + 0.5, torch.rand(case.head_dim) + 0.5
        self.norms = norms if case.normed else None
        sizes = CacheShape(2, case.kv_heads, case.head_dim, case.block_size, dtype)
        self.cache = kernels.network.kv_cache(sizes, total)
        self.cache.keys.fill_(float("nan"))
        self.cache.values.fill_(float("nan"))
        frequencies = 1e4 ** -(torch.arange(0, case.head_dim, 2) / case.head_dim)
        shape = AttentionShape(case.heads, case.head_dim, (0, case.window), 1e-6, frequencies)
        if processors > 1:
            self.attention = PagedAttention(shape, self.cache, table, SLOTS * CONTEXT, dtype, processors)
        else:
            self.attention = kernels.network.attention(shape, self.cache, table, SLOTS * CONTEXT)

    def step(self, starts: list[int], counts: list[int], padding: int = 0) -> torch.Tensor:
        """Return [tokens, heads * head_dim] of the windowed layer. `padding`: more rows that compute nothing."""
        slots = np.flatnonzero(counts).astype(np.int32)
        here = [np.array(column, np.int32)[slots] for column in (starts, counts)]
        rows = Rows(slots, slots, *here, np.ones(len(slots), np.bool_), np.zeros(len(slots), np.int32))
        tokens = sum(counts)
        ints = [torch.empty(tokens + padding, dtype=torch.int32) for _ in range(4)]
        tiles = torch.empty(tokens + padding, 4, dtype=torch.int32)
        batch = BatchTensors(*ints[:3], tiles, ints[3])
        number, _ = self.kernels.rows.lay_out(rows, None, 1, batch)
        parts = [self.qkv[slot, start : start + n] for slot, start, n in zip(slots, *here, strict=True)]
        qkv = torch.cat((*parts, torch.randn(padding, self.qkv.shape[2]).to(self.dtype)))
        out = torch.full(
            (tokens + padding, self.case.heads * self.case.head_dim), float("nan"), dtype=self.dtype
        )
        self.attention.begin(batch.positions, batch.slots)
        self.attention.write(1, qkv, self.norms)
        self.attention.attend(1, tiles[: number + padding], out)
        return out[:tokens]


def both(
    make: KernelMaker, case: PagedCase, dtype: torch.dtype, processors: int = 1
) -> tuple[PagedTokens, PagedTokens]:
    return (
        PagedTokens(make(dtype), case, dtype, processors),
        PagedTokens(ReferenceKernels(dtype), case, dtype),
    )


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, "float32") for case in CASES), (CASES[2], "half")],
    ids=str,
    indirect=["dtype"],
)
def test_equals_the_reference(
    make: KernelMaker, accuracy: Accuracy, case: PagedCase, dtype: torch.dtype
) -> None:
    """Chunks of one and several tiles, decode rows among them, and decode rows alone."""
    ours, theirs = both(make, case, dtype)
    for step in MIXED:
        torch.testing.assert_close(ours.step(*step), theirs.step(*step), **accuracy.attention[dtype])


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_keys_are_divided_among_programs(make: KernelMaker, case: PagedCase) -> None:
    """Also where a part has no keys, and for decode rows with drafts."""
    ours, theirs = both(make, case, F32, processors=16)
    steps = [*MIXED, ([68, 14, 10], [5, 0, 1]), ([73, 0, 0], [1, 0, 0])]
    for step in steps:
        torch.testing.assert_close(ours.step(*step), theirs.step(*step), atol=3e-6, rtol=1e-5)


def test_padding_rows_write_nothing(make: KernelMaker, accuracy: Accuracy) -> None:
    ours, theirs = both(make, CASES[0], F32)
    ours.step(*MIXED[0])
    theirs.step(*MIXED[0])
    before = ours.cache.keys.clone()
    expected = theirs.step([66, 1, 0], [1, 1, 0])
    padded = ours.step([66, 1, 0], [1, 1, 0], padding=6)
    torch.testing.assert_close(padded, expected, **accuracy.attention[F32])
    changed = (ours.cache.keys.nan_to_num(7.0) != before.nan_to_num(7.0)).any(-1)
    assert int(changed.sum()) == 2 * CASES[0].kv_heads


def test_no_rows(make: KernelMaker) -> None:
    ours, _ = both(make, CASES[0], F32)
    assert len(ours.step([0, 0, 0], [0, 0, 0])) == 0
