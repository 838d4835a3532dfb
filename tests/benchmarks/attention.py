"""Attention over the paged cache with one thread, relative to torch's attention on contiguous keys and values.

Both run in turns on caches that are larger than the processor's, and after a pass over other memory; the figures are
ratios of the least times. Keys and values are one piece of memory for torch, and blocks anywhere in memory for us.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from services.worker.batch.slots import Rows
from services.worker.kernels.interface.attention import AttentionShape
from services.worker.kernels.interface.kv_cache import CacheShape
from services.worker.kernels.interface.rows import BatchTensors
from services.worker.kernels.selection import choose, create, processor_features
from tests.benchmarks.support.report import report

BLOCK_SIZE, HEAD_DIM = 16, 64
OTHER_BYTES = 32 << 20


@dataclass(frozen=True)
class AttentionLoad:
    heads: int
    kv_heads: int
    requests: int
    start: int
    """Tokens of each request that are in the cache."""
    count: int
    """Tokens of each request in the step."""


LOADS = {
    "m155, decode 16 x 1,024": AttentionLoad(16, 8, 16, 1023, 1),
    "m155, prefill 1,024": AttentionLoad(16, 8, 1, 0, 1024),
}


def paged(load: AttentionLoad, dtype: torch.dtype) -> Callable[[], object]:
    """Return a call of our attention over blocks anywhere in the cache."""
    kernels = create(choose("compiled", "cpu", dtype, processor_features()))
    kernels.use_threads(1)
    network, activations = kernels.network, kernels.network.activations
    tokens, blocks = load.requests * load.count, -(-(load.start + load.count) // BLOCK_SIZE)
    table = torch.randperm(load.requests * blocks, dtype=torch.int32).view(load.requests, blocks)
    cache = network.kv_cache(CacheShape(1, load.kv_heads, HEAD_DIM, BLOCK_SIZE, dtype), table.numel())
    cache.keys.normal_()
    cache.values.normal_()
    frequencies = 1e4 ** -(torch.arange(0, HEAD_DIM, 2)[None] / HEAD_DIM)
    rotary = frequencies, torch.ones_like(frequencies), (0,)
    shape = AttentionShape(load.heads, HEAD_DIM, (0,), 1e-6, *rotary, HEAD_DIM**-0.5, 1, (0,), (0,))
    attention = network.attention(shape, cache, table, tokens)
    slots = np.arange(load.requests, dtype=np.int32)
    columns = np.full_like(slots, load.start), np.full_like(slots, load.count)
    rows = Rows(slots, slots, *columns, np.ones(len(slots), np.bool_), np.zeros_like(slots))
    ints = [torch.empty(tokens, dtype=torch.int32) for _ in range(3)]
    batch = BatchTensors(*ints, torch.empty(tokens, 4, dtype=torch.int32), torch.empty_like(ints[0]))
    tiles, _ = kernels.rows.lay_out(rows, None, 1, batch)
    qkv = torch.randn(tokens, (load.heads + 2 * load.kv_heads) * HEAD_DIM).to(activations)
    out = torch.empty(tokens, load.heads * HEAD_DIM, dtype=activations)
    attention.begin(batch.positions, batch.slots)
    attention.write(0, qkv)
    return lambda: attention.attend(0, batch.tiles[:tiles], out)


def contiguous(load: AttentionLoad, dtype: torch.dtype) -> Callable[[], object]:
    """Return a call of torch's attention."""
    context = load.start + load.count
    query = torch.randn(load.requests, load.heads, load.count, HEAD_DIM).to(dtype)
    key, value = (torch.randn(load.requests, load.kv_heads, context, HEAD_DIM).to(dtype) for _ in range(2))
    return lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=load.count > 1, enable_gqa=True)


@torch.inference_mode()
def measured(load: AttentionLoad, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """Return the least milliseconds of each way."""
    ways = {"paged": paged(load, dtype), "torch": contiguous(load, dtype)}
    other, times = torch.ones(OTHER_BYTES // 4), dict[str, list[float]]((name, []) for name in ways)
    for _ in range(repeats):
        for name, call in ways.items():
            other.add_(1)
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    return {name: 1e3 * min(found) for name, found in times.items()}


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=25)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for name, load in LOADS.items():
        for dtype in (torch.bfloat16, torch.float32):
            times = measured(load, dtype, args.repeats)
            rows.append(
                {
                    "load": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "paged, ms": times["paged"],
                    "torch, ms": times["torch"],
                    "ratio": times["paged"] / times["torch"],
                }
            )
    report(
        "attention",
        title=f"attention of one layer, one thread: least of {args.repeats}",
        rows=rows,
        figures={"over_torch": {f"{row['load']}, {row['dtype']}": row["ratio"] for row in rows}},
        settings=vars(args),
        repeats=rows,
    )
