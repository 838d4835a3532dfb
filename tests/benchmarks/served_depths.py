"""Depth two beside depth one, as clients of `runahead serve` see it: throughput, time to first token, inter-token
latency.

The servers of both depths run at the same time and get the load in turns. m135 has the shape of SmolLM2-135M.
"""

import argparse
from typing import Any

from tests.benchmarks.support.random_llama import SHAPES, random_llama
from tests.benchmarks.support.report import add_ints, medians, report
from tests.benchmarks.support.servers import BACKENDS, forward_seconds, served, side_by_side

DEPTHS = (1, 2)
COLUMNS = {
    "tokens/s": "output_throughput",
    "TTFT": "mean_ttft_ms",
    "ITL": "mean_itl_ms",
    "ITL p99": "p99_itl_ms",
    "gap": "gap_share",
}
"""Column -> metric of a load: tokens/s, milliseconds, and the gaps between forward passes over the forward passes."""

Loads = dict[int, list[dict[str, Any]]]
"""Depth -> the metrics of each load."""


def measure(model: str, backend: str, args: argparse.Namespace) -> Loads:
    """Serve the load `args.repeats` times at each depth."""
    loads: Loads = {depth: [] for depth in DEPTHS}
    common = (f"--threads={args.threads}", "--max-model-len=1024")
    settings = {depth: (f"--batch-queue-depth={depth}", *common) for depth in DEPTHS}
    with side_by_side(random_llama(model), backend, args.dtype, settings) as servers:
        for number in range(args.repeats):
            for depth in DEPTHS if number % 2 == 0 else reversed(DEPTHS):
                url = servers[depth].url
                before = forward_seconds(url)
                load = served(url, args.concurrency, args.input_len, args.output_len, args.waves)
                forward, gap = (after - first for first, after in zip(before, forward_seconds(url), strict=True))
                loads[depth].append({**load, "gap_share": gap / forward})
    return loads


def columns(loads: Loads, depth: int) -> dict[str, float]:
    return medians([{name: load[key] for name, key in COLUMNS.items()} for load in loads[depth]])


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=["m4", "m155", "m135"], choices=SHAPES)
    parser.add_argument("--backends", nargs="+", default=["native"], choices=BACKENDS)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    add_ints(parser, threads=1, concurrency=16, input_len=128, output_len=128, waves=2, repeats=3)
    args = parser.parse_args()
    cases = {f"{model}, {backend}": measure(model, backend, args) for model in args.models for backend in args.backends}
    report(
        "served_depths",
        title=f"{args.dtype}, {args.threads} threads, concurrency {args.concurrency}: medians of {args.repeats}; ms",
        rows=[
            {"model, backend": case, "depth": depth, **columns(loads, depth)}
            for case, loads in cases.items()
            for depth in DEPTHS
        ],
        figures={
            f"{case}: depth 2 over depth 1": {
                name: columns(loads, 2)[name] / columns(loads, 1)[name] for name in COLUMNS
            }
            for case, loads in cases.items()
        },
        settings={"columns": COLUMNS, **vars(args)},
        repeats=cases,
    )
