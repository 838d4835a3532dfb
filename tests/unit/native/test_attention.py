"""Paged attention of every implementation against torch's own attention on contiguous keys and values."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.unit.native.attention_cases import SLOTS, AttentionCase, PagedTokens
from tests.unit.native.implementations import BF16, F32, every_implementation, make

CONTEXT = 50
CASES = [
    AttentionCase(4, 2, 64, 16),
    AttentionCase(4, 4, 24, 5),
    AttentionCase(6, 2, 80, 16, window=17),
    AttentionCase(7, 1, 8, 3, window=7, normed=True),
    AttentionCase(2, 1, 128, 32, window=1),
    AttentionCase(3, 3, 16, 1, normed=True),
    AttentionCase(6, 2, 20, 16, all_heads=True, turns=False),
    AttentionCase(8, 2, 64, 16, window=19, sinks=True),
    AttentionCase(9, 3, 96, 48),
    AttentionCase(24, 1, 24, 16, window=23, turns=False),
    AttentionCase(3, 3, 26, 32, normed=True),
]
KINDS = [(F32, F32), (F32, BF16), (BF16, BF16)]
each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_kind = pytest.mark.parametrize("kinds", KINDS, ids=str)


def tokens(implementation: str, case: AttentionCase, activations: torch.dtype, cache: torch.dtype) -> PagedTokens:
    return PagedTokens(make(implementation, cache, activations), case, CONTEXT, activations, cache)


def contiguous(tokens: PagedTokens) -> torch.Tensor:
    """Return torch's attention of all tokens: [sequences, context, heads * head_dim]."""
    case = tokens.case
    heads = tokens.qkv.float().view(SLOTS, CONTEXT, -1, case.head_dim).transpose(1, 2)
    q, k, v = heads.split([case.heads, case.kv_heads, case.kv_heads], 1)
    if tokens.norms is not None:
        q, k = (heads_normed(x, w) for x, w in zip((q, k), tokens.norms, strict=True))
    query, key = torch.arange(CONTEXT)[:, None], torch.arange(CONTEXT)
    mask = (key <= query) & (key > query - (case.window or CONTEXT))
    angles = query * tokens.frequencies
    if tokens.sinks is None:
        q, k = rotated(q, angles), rotated(k, angles)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)
    q, k = 1.25 * rotated(q, angles), 1.25 * rotated(k, angles)
    k, v = (x.repeat_interleave(case.heads // case.kv_heads, 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) * case.head_dim**-0.5).masked_fill(~mask, -torch.inf)
    sinks = tokens.sinks[:, None, None].expand(SLOTS, -1, CONTEXT, 1)
    chances = torch.cat((scores, sinks), 3).softmax(3)[..., :-1]
    return (chances @ v).transpose(1, 2).flatten(2)


def heads_normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[sequences, heads, context, head_dim]"""
    if len(weight) == x.shape[3]:
        return F.rms_norm(x, (len(weight),), weight, 1e-6)
    whole = F.rms_norm(x.transpose(1, 2).flatten(2), (len(weight),), weight, 1e-6)
    return whole.unflatten(2, (x.shape[1], x.shape[3])).transpose(1, 2)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@every_implementation
@each_case
@each_kind
def test_equals_contiguous_attention(
    implementation: str, case: AttentionCase, kinds: tuple[torch.dtype, torch.dtype]
) -> None:
    paged = tokens(implementation, case, *kinds)
    outputs = paged.step([0] * SLOTS, [CONTEXT] * SLOTS).view(SLOTS, CONTEXT, -1)
    tolerance = 2e-6 if kinds[1] == F32 else 0.05
    torch.testing.assert_close(outputs.float(), contiguous(paged), atol=tolerance, rtol=0)


@each_case
@each_kind
def test_chunks_change_no_bit(case: AttentionCase, kinds: tuple[torch.dtype, torch.dtype]) -> None:
    """With compiled kernels; chunks end at block boundaries and inside of blocks, and some steps lack a row."""
    outputs = tokens("compiled", case, *kinds).step([0] * SLOTS, [CONTEXT] * SLOTS)
    pieces = tokens("compiled", case, *kinds)
    seen: list[list[torch.Tensor]] = [[] for _ in range(SLOTS)]
    starts = [0] * SLOTS
    for number, counts in enumerate([[1, 20, 7], [13, 1, 9], [9, 0, 20], [0, 28, 0], [10, 0, 1], [17, 1, 13]]):
        assert max(np.add(starts, counts)) <= CONTEXT, number
        for slot, part in enumerate(pieces.step(starts, counts).split(counts)):
            seen[slot].append(part)
        starts = np.add(starts, counts).tolist()
    assert starts == [CONTEXT] * SLOTS
    for slot, whole in enumerate(outputs.view(SLOTS, CONTEXT, -1)):
        assert torch.equal(torch.cat(seen[slot]), whole)


@every_implementation
def test_a_step_of_one_token(implementation: str) -> None:
    paged = tokens(implementation, CASES[0], F32, F32)
    paged.step([0, 0, 0], [0, CONTEXT - 1, 0])
    last = paged.step([0, CONTEXT - 1, 0], [0, 1, 0])
    torch.testing.assert_close(last[0], contiguous(paged)[1, -1], atol=2e-6, rtol=0)
