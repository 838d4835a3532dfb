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


def measure(ranks: int, depth: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the metrics of one run."""
    rng = np.random.default_rng(0)
    scheduler = {
        "batching_policy": "phased",
        "block_size": BLOCK,
        "max_num_batched_tokens": CHUNK,
        "max_model_len": 2048,
        "max_num_seqs": args.requests,
        "max_num_queued_reqs": 4096,
        "phased_max_volume": args.volume,
        "tensor_parallel_size": ranks,
        "batch_queue_depth": depth,
    }
    worker = {
        "backend": "sim",
        "sim_rigid": True,
        "sim_step_ms": args.step_ms,
        "sim_prefill_token_us": 20.0,
        "sim_vocab_size": 1024,
        "sim_max_volume": args.volume,
    }
    with engine(scheduler, worker, ranks) as client:
        for number in range(args.total):  # prompts of one to three chunks
            tokens = rng.integers(300, 1000, int(rng.integers(1, 3 * CHUNK))).astype(np.int32)
            client.generate(tokens, number, int(rng.integers(args.output // 2, args.output)))
        while client.finished < args.total:
            client.receive()
        return client.window(args.requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_ints(parser, repeats=3, total=128)
    parser.add_argument("--requests", type=int, default=32, help="maximum number of running requests")
    parser.add_argument("--output", type=int, default=200, help="maximum number of tokens per request")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--volume", type=int, default=65536, help="maximum of rows times longest row, tokens")
    args = parser.parse_args()
    runs: dict[int, dict[int, list[dict[str, float]]]] = {ranks: {depth: [] for depth in DEPTHS} for ranks in SIZES}
    for _ in range(args.repeats):  # alternate, so that noise of the machine affects all
        for ranks in SIZES:
            for depth in DEPTHS:
                runs[ranks][depth].append(measure(ranks, depth, args))

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


if __name__ == "__main__":
    main()
