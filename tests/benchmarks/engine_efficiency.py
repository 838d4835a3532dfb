"""Cost of serving: tokens/s through HTTP relative to the same kernels on a static batch without an engine.

Also relative to bare torch (decode only), from the same run. A second table has the processor time of each process
while it served. `vllm_served` compares with vLLM.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.support.processor_time import processor_times, usage_rows
from tests.benchmarks.support.random_llama import SHAPES, random_llama
from tests.benchmarks.support.report import print_table, report
from tests.benchmarks.support.servers import ServerProcess, runahead_process, served

SUPPORT = Path(__file__).parent / "support"


def without_engine(script: str, model: Path, args: argparse.Namespace) -> dict[str, float]:
    """Run a script of tests/benchmarks/support in a process of its own and return the metrics of its static batch."""
    command = [
        sys.executable, str(SUPPORT / script), f"--model={model}", f"--threads={args.threads}", f"--dtype={args.dtype}",
        f"--batch={args.concurrency}", f"--prompt={args.input_len}", f"--output={args.output_len}",
        f"--waves={args.waves}",
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="m155", help=f"a directory, or a random model: {', '.join(SHAPES)}")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    for name, default in (
        ("threads", 2), ("concurrency", 16), ("input-len", 128), ("output-len", 128), ("waves", 4), ("repeats", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    model = random_llama(args.model) if args.model in SHAPES else Path(args.model)
    flags = [f"--threads={args.threads}", f"--dtype={args.dtype}"]
    repeats: dict[str, list[dict[str, object]]] = {"runahead": [], "static batch": [], "bare torch": []}
    for _ in range(args.repeats):  # alternate, so that noise of the machine affects all
        with runahead_process(model, *flags) as server:
            repeats["runahead"].append(measured(server, args))
        repeats["static batch"].append(dict(without_engine("static_batch.py", model, args)))
        repeats["bare torch"].append(dict(without_engine("bare_torch.py", model, args)))
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


if __name__ == "__main__":
    main()
