"""Cost of serving: tokens/s through HTTP relative to the same kernels on a static batch without an engine.

Also relative to bare torch (decode only), from the same run. A second table has the processor time of each process
while it served. `peers` compares with vLLM.
"""

import argparse
import statistics
from typing import Any

from tests.benchmarks.support.processor_time import processor_times, usage_rows
from tests.benchmarks.support.random_llama import SHAPES, named_model
from tests.benchmarks.support.report import add_ints, print_table, report
from tests.benchmarks.support.servers import BatchLoad, ServerProcess, runahead_process, served, without_engine


def measured(server: ServerProcess, args: argparse.Namespace) -> dict[str, object]:
    """Return the metrics of the load, with the processor time of each process while it was served."""
    lengths = args.input_len, args.output_len
    served(server.url, 2, *lengths, waves=1, warmups=0)
    before = processor_times(server)
    load = served(server.url, args.concurrency, *lengths, args.waves, warmups=0)
    after = processor_times(server)
    tokens = args.concurrency * args.waves * args.output_len
    return {**load, "processor_time": usage_rows(before, after, load["duration"], tokens)}


def median_usage(runs: list[dict[str, Any]]) -> list[dict[str, object]]:
    """Return the median of each cell of the tables of processor time."""
    cells = zip(*(run["processor_time"] for run in runs), strict=True)
    return [
        {
            column: value if column == "process" else statistics.median(row[column] for row in rows)
            for column, value in rows[0].items()
        }
        for rows in cells
    ]


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="m155", help=f"a directory, or a random model: {', '.join(SHAPES)}")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    add_ints(parser, threads=2, concurrency=16, input_len=128, output_len=128, waves=4, repeats=3)
    args = parser.parse_args()
    model = named_model(args.model)
    common = {"threads": args.threads, "dtype": args.dtype}
    batch = BatchLoad(
        model, **common, batch=args.concurrency, prompt=args.input_len, output=args.output_len, waves=args.waves
    )
    repeats: dict[str, list[dict[str, object]]] = {"runahead": [], "static batch": [], "bare torch": []}
    for _ in range(args.repeats):  # alternate, so that noise of the machine affects all
        with runahead_process(model, *(f"--{name}={value}" for name, value in common.items())) as server:
            repeats["runahead"].append(measured(server, args))
        for name in ("static batch", "bare torch"):
            repeats[name].append(dict(without_engine(name.replace(" ", "_"), batch)))
    rates = {
        name: statistics.median(float(str(run.get("output_throughput", run.get("tokens_per_s")))) for run in runs)
        for name, runs in repeats.items()
    }
    ours = rates["runahead"]
    print_table("processor time while runahead served: shares of a core, medians", median_usage(repeats["runahead"]))
    report(
        "engine_efficiency",
        title=f"{args.model}, {args.dtype}, {args.threads} threads, concurrency {args.concurrency}: medians",
        rows=[{"run": name, "output tokens/s": rate, "runahead / this": ours / rate} for name, rate in rates.items()],
        figures={
            "ratio": ours / rates["static batch"],
            "over_bare_torch": ours / rates["bare torch"],
            "output_throughput": rates,
        },
        settings=vars(args),
        repeats=repeats,
    )
