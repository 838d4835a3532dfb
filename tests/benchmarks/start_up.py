"""Start-up: seconds and CPU time from `runahead serve` to the line that names its URL, on a prepared environment."""

import argparse
import statistics
import time
from pathlib import Path

from tests.benchmarks.support.processor_time import cpu_seconds
from tests.benchmarks.support.random_llama import SHAPES, named_model
from tests.benchmarks.support.report import report
from tests.benchmarks.support.servers import runahead_process


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="m135", help=f"a path, or a random model: {', '.join(SHAPES)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("flags", nargs="*", help="of `runahead serve`")
    args = parser.parse_args()
    model = named_model(args.model)
    _start(model, args.flags)  # compiles what is not compiled, and reads the files into memory
    repeats = [_start(model, args.flags) for _ in range(args.repeats)]
    rows = [
        {"": name, **{part: f(run[part] for run in repeats) for part in repeats[0]}}
        for name, f in (("median", statistics.median), ("least", min), ("most", max))
    ]
    report(
        "start_up",
        title=f"{args.model}: seconds until it serves; CPU seconds of each process until then",
        rows=rows,
        figures={"seconds": statistics.median(run["ready s"] for run in repeats)},
        settings=vars(args),
        repeats=repeats,
    )


def _start(model: Path, flags: list[str]) -> dict[str, float]:
    began = time.monotonic()
    with runahead_process(model, *flags) as server:
        return {"ready s": time.monotonic() - began, **cpu_seconds(server)}
