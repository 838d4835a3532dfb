"""Effect of a second rank: tokens/s of a static batch on the native backend at TP=2 relative to TP=1.

Ranks are processes with one thread each, which sum through shared memory, without scheduler and HTTP. The sizes of a
repeat are measured one after the other, so that noise of the machine affects all.
"""

import argparse

from services.checkpoint import DEMO_MODEL
from tests.benchmarks.support.random_llama import SHAPES, named_model
from tests.benchmarks.support.report import add_ints, medians, report
from tests.benchmarks.support.servers import BatchLoad, without_engine


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models", nargs="+", default=["demo", "m155"],
        help=f"demo, a directory, or a random model: {', '.join(SHAPES)}",
    )  # fmt: skip
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    add_ints(parser, batch=16, prompt=128, output=64, waves=1, repeats=3)
    args = parser.parse_args()
    paths = {name: DEMO_MODEL if name == "demo" else named_model(name) for name in args.models}
    shape = args.batch, args.prompt, args.output, args.waves
    repeats: dict[str, dict[int, list[dict[str, float]]]] = {name: {size: [] for size in args.sizes} for name in paths}
    for _ in range(args.repeats):
        for name, path in paths.items():
            for size in args.sizes:
                repeats[name][size].append(without_engine("static_batch", BatchLoad(path, args.dtype, 1, *shape), size))
    rows, ratios = [], {}
    for name, sizes in repeats.items():
        by_size = {size: medians(runs) for size, runs in sizes.items()}
        for size, median in by_size.items():
            ratio = median["tokens_per_s"] / by_size[args.sizes[0]]["tokens_per_s"]
            ratios[f"{name}_tp{size}"] = ratio
            rows.append(
                {
                    "model": name,
                    "ranks": size,
                    "output tokens/s": median["tokens_per_s"],
                    "prefill, s": median["prefill_s"],
                    "decode step, ms": median["decode_step_ms"],
                    f"over TP={args.sizes[0]}": ratio,
                }
            )
    report(
        "tensor_parallel",
        title=f"{args.dtype}, one thread per rank, batch {args.batch}, {args.prompt} in, {args.output} out: medians",
        rows=rows,
        figures={"over_one_rank": ratios},
        settings=vars(args),
        repeats=repeats,
    )
