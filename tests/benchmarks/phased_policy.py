"""What running ahead is worth to a rigid device: its idle share at depth 1 and 2, at TP 1, 2 and 4.

Requests keep coming (a finished one is replaced at once), so prefill chunks and decode batches take turns all the time.
The window lies between the first and the last report of the engine with all seats taken. Ranks run as processes on this
machine and each compares its results with all others in every step; the device's times are those of the cost model.
*Idle* is the time in which the device had nothing to do and its rank waited for a plan; *not busy* is all time between
steps, what ranks wait for one another included.
"""

import argparse
import statistics

import numpy as np

from tests.benchmarks.support.engine_client import engine
from tests.benchmarks.support.report import report

SIZES = (1, 2, 4)
DEPTHS = (1, 2)
BLOCK, CHUNK = 64, 256
"""Tokens: the shapes of the device."""


def measure(ranks: int, depth: int, args: argparse.Namespace) -> dict[str, float]:
    """Figures of one run."""
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
        "log_level": "warning",
    }
    worker = {
        "backend": "sim",
        "sim_rigid": True,
        "sim_step_ms": args.step_ms,
        "sim_prefill_token_us": 20.0,
        "sim_vocab_size": 1024,
        "sim_max_volume": args.volume,
        "threads": 1,
        "log_level": "warning",
    }
    with engine(scheduler, worker, ranks) as client:
        for number in range(args.total):  # prompts of one to three chunks
            tokens = rng.integers(300, 1000, int(rng.integers(1, 3 * CHUNK))).astype(np.int32)
            client.generate(tokens, number, int(rng.integers(args.output // 2, args.output)))
        while client.finished < args.total:
            client.receive()
        full = [sample for sample in client.samples if sample.running == args.requests and sample.tokens]
    if len(full) < 3:
        raise SystemExit(f"{len(full)} reports with all seats taken; the run is too short to judge")
    first, last = full[0], full[-1]
    wall, steps = last.at - first.at, last.steps - first.steps
    return {
        "idle": (last.idle - first.idle) / wall,
        "not_busy": 1 - (last.busy - first.busy) / wall,
        "tokens_per_s": (last.tokens - first.tokens) / wall,
        "step_ms": 1e3 * wall / steps,
        "seconds": wall,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32, help="requests running at once")
    parser.add_argument("--total", type=int, default=128)
    parser.add_argument("--output", type=int, default=200, help="most tokens per request")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--volume", type=int, default=65536, help="rows times longest row, tokens")
    args = parser.parse_args()
    runs: dict[int, dict[int, list[dict[str, float]]]] = {
        ranks: {depth: [] for depth in DEPTHS} for ranks in SIZES
    }
    for _ in range(args.repeats):  # side by side, so that a noisy minute meets all
        for ranks in SIZES:
            for depth in DEPTHS:
                runs[ranks][depth].append(measure(ranks, depth, args))

    def median(ranks: int, depth: int) -> dict[str, float]:
        found = runs[ranks][depth]
        return {name: statistics.median(run[name] for run in found) for name in found[0]}

    report(
        "phased_policy",
        title=f"phased on a rigid device (simulated): medians of {args.repeats}",
        rows=[{"TP": ranks, "depth": depth, **median(ranks, depth)} for ranks in SIZES for depth in DEPTHS],
        figures={
            f"idle_depth{depth}": {str(ranks): median(ranks, depth)["idle"] for ranks in SIZES}
            for depth in DEPTHS
        }
        | {"not_busy_depth2": {str(ranks): median(ranks, 2)["not_busy"] for ranks in SIZES}},
        settings={"block": BLOCK, "chunk": CHUNK, **vars(args)},
        repeats={str(ranks): {str(depth): runs[ranks][depth] for depth in DEPTHS} for ranks in SIZES},
    )


if __name__ == "__main__":
    main()
