"""`--threads 0` beside each explicit number of threads, alone and beside a process that keeps a core busy.

The servers of all settings run at the same time and get the loads in turns.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from services.worker.machine import cores
from tests.benchmarks.support.random_llama import SHAPES, random_llama
from tests.benchmarks.support.report import report
from tests.benchmarks.support.servers import BACKENDS, served, side_by_side

TOKENS, WAVES = 64, {1: 6, 16: 2, 64: 3}
"""Tokens of each prompt and answer; streams -> requests of each."""

Loads = dict[tuple[int, int, bool], list[float]]
"""Streams, `--threads`, beside a busy process -> tokens/s of each load."""


@contextmanager
def busy_core() -> Iterator[None]:
    """Run a process that keeps one core busy."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def measure(model: str, backend: str, args: argparse.Namespace) -> Loads:
    loads: Loads = {}
    settings = {threads: (f"--threads={threads}", "--max-model-len=512") for threads in range(cores() + 1)}
    with side_by_side(random_llama(model), backend, args.dtype, settings) as servers:
        for server in servers.values():
            served(server.url, max(args.streams), TOKENS, TOKENS, 1)
        for _ in range(args.repeats):
            for streams in args.streams:
                for threads, server in servers.items():
                    for is_busy in (False, True):
                        with busy_core() if is_busy else ExitStack():
                            load = served(server.url, streams, TOKENS, TOKENS, WAVES.get(streams, 2))
                        loads.setdefault((streams, threads, is_busy), []).append(load["output_throughput"])
    return loads


def row(case: str, loads: Loads, streams: int) -> dict[str, Any]:
    """Return the medians of one number of streams, tokens/s, and the two ratios that matter."""
    found = {key[1:]: statistics.median(values) for key, values in loads.items() if key[0] == streams}
    best = max(value for (threads, is_busy), value in found.items() if threads and not is_busy)
    names = {f"{threads or 'auto'}{', busy' if is_busy else ''}": value for (threads, is_busy), value in found.items()}
    return {
        "model, backend": case,
        "streams": streams,
        **names,
        "auto over best": found[0, False] / best,
        "busy over alone": found[0, True] / found[0, False],
    }


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=["m4", "m155"], choices=SHAPES)
    parser.add_argument("--backends", nargs="+", default=["native", "vllm"], choices=BACKENDS)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    cases = {f"{model}, {backend}": measure(model, backend, args) for model in args.models for backend in args.backends}
    report(
        "threads",
        title=f"{args.dtype}: tokens/s by --threads, medians of {args.repeats}",
        rows=[row(case, loads, streams) for case, loads in cases.items() for streams in args.streams],
        figures={},
        settings=vars(args),
        repeats={
            case: {f"{streams}, {threads}, {'busy' if is_busy else 'alone'}": values
                   for (streams, threads, is_busy), values in loads.items()}
            for case, loads in cases.items()
        },
    )  # fmt: skip
