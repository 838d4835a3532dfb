"""Effect of run-ahead on a rigid device: its idle share at depth 1 and 2, with 1, 2 and 4 tensor-parallel ranks.

A new request replaces each finished one, so prefill chunks and decode batches alternate all the time. Ranks are
processes on this machine, and each compares its results with all others in every step; the times of the device are
those of the cost model. *Idle* is the time in which the device has no work and its rank waits for a plan.
"""

import argparse

import numpy as np

from tests.benchmarks.support.engine_client import engine
from tests.benchmarks.support.report import add_ints, medians, report

SIZES = (1, 2, 4)
DEPTHS = (1, 2)
BLOCK, CHUNK = 64, 256
"""Shapes of the device, tokens."""
REQUESTS, OUTPUT, VOLUME = 32, 200, 65536
"""Running requests, tokens of a request, and rows times the longest row: the largest numbers."""


def measure(ranks: int, depth: int, total: int) -> dict[str, float]:
    """Return the metrics of one run."""
    rng = np.random.default_rng(0)
    scheduler = {
        "batching_policy": "phased",
        "block_size": BLOCK,
        "max_num_batched_tokens": CHUNK,
        "max_model_len": 2048,
        "max_num_seqs": REQUESTS,
        "max_num_queued_reqs": 4096,
        "phased_max_volume": VOLUME,
        "tensor_parallel_size": ranks,
        "batch_queue_depth": depth,
    }
    worker = {
        "backend": "sim",
        "sim_rigid": True,
        "sim_step_ms": 10.0,
        "sim_prefill_token_us": 20.0,
        "sim_vocab_size": 1024,
        "sim_max_volume": VOLUME,
    }
    with engine(scheduler, worker, ranks) as client:
        for number in range(total):  # prompts of one to three chunks
            tokens = rng.integers(300, 1000, int(rng.integers(1, 3 * CHUNK))).astype(np.int32)
            client.generate(tokens, number, int(rng.integers(OUTPUT // 2, OUTPUT)))
        while client.finished < total:
            client.receive()
        return client.window(REQUESTS)


def main(parser: argparse.ArgumentParser) -> None:
    add_ints(parser, repeats=3, total=128)
    args = parser.parse_args()
    runs: dict[int, dict[int, list[dict[str, float]]]] = {ranks: {depth: [] for depth in DEPTHS} for ranks in SIZES}
    for _ in range(args.repeats):  # alternate, so that noise of the machine affects all
        for ranks in SIZES:
            for depth in DEPTHS:
                runs[ranks][depth].append(measure(ranks, depth, args.total))

    median = {ranks: {depth: medians(runs[ranks][depth]) for depth in DEPTHS} for ranks in SIZES}
    report(
        "phased_policy",
        title=f"phased on a rigid device (simulated): medians of {args.repeats}",
        rows=[{"TP": ranks, "depth": depth, **median[ranks][depth]} for ranks in SIZES for depth in DEPTHS],
        figures={
            f"idle_depth{depth}": {str(ranks): median[ranks][depth]["idle_fraction"] for ranks in SIZES}
            for depth in DEPTHS
        },
        settings={"block": BLOCK, "chunk": CHUNK, **vars(args)},
        repeats={str(ranks): {str(depth): runs[ranks][depth] for depth in DEPTHS} for ranks in SIZES},
    )
