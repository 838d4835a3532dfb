"""Effect of kernels that never wait for a thread without a core.

Decode steps of the demo model with kernels on the calling thread alone, shared with helper threads, and shared with
OpenMP's threads; on an idle machine, and beside a process that keeps one core busy. All run in turn in one process.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch

from services.checkpoint import DEMO_MODEL
from services.worker.kernels.cpu import thread_team
from tests.benchmarks.speculation import text_prompts
from tests.benchmarks.support.report import add_ints, report
from tests.benchmarks.threads import busy_core
from tests.integration.native.driver import DrivenRequest, RunnerDriver

STEPS = 5
"""Steps in a row with the same kind of threads; the first one is not counted."""
PAUSE = 0.02
"""Pause between kinds of threads, in which OpenMP's threads stop spinning, seconds."""
Ways = dict[str, Callable[[bool], tuple[int, int]]]


def ways(threads: int) -> Ways:
    openmp = thread_team.openmp_address(), threads
    return {
        "alone": lambda beside_torch: thread_team.ALONE,
        "helpers": thread_team.shared,
        "OpenMP": lambda beside_torch: openmp,
    }


def prefilled(driver: RunnerDriver, rows: int, size: int) -> list[DrivenRequest]:
    requests = [driver.add(prompt.tolist()) for prompt in text_prompts(rows, size)]
    driver.step([(request, size) for request in requests])
    return requests


def steps(driver: RunnerDriver, requests: list[DrivenRequest], number: int) -> list[float]:
    """Run `number` decode steps and return the seconds of each."""
    seconds = []
    for _ in range(number):
        started = time.perf_counter()
        driver.step([(request, 1) for request in requests])
        seconds.append(time.perf_counter() - started)
    return seconds


def measured(driver: RunnerDriver, args: argparse.Namespace) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in ways(args.threads)}
    requests = prefilled(driver, args.rows, args.input_len)
    for _ in range(args.turns):
        for name, way in ways(args.threads).items():
            time.sleep(PAUSE)
            with mock.patch.object(thread_team, "shared", way):
                seconds[name] += steps(driver, requests, STEPS)[1:]
    for request in requests:
        driver.finish(request)
        driver.free_blocks += request.blocks
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_ints(parser, threads=2, rows=8, input_len=96, turns=20)
    args = parser.parse_args()
    driver = RunnerDriver(DEMO_MODEL, block_size=16, dtype="float32", threads=args.threads)
    driver.pending_logits = lambda: lambda: torch.empty(0)  # type: ignore[method-assign]
    results = {"quiet": measured(driver, args)}
    with busy_core():
        results["busy"] = measured(driver, args)
    mean = {at: {name: statistics.fmean(each) for name, each in by.items()} for at, by in results.items()}
    report(
        "shared_kernels",
        title=f"decode steps of {args.rows} rows, {args.threads} threads",
        rows=[
            {"machine": at, "kernels": name, "ms a step": 1e3 * seconds, "over alone": mean[at]["alone"] / seconds}
            for at, by in mean.items()
            for name, seconds in by.items()
        ],
        figures={f"helpers_over_openmp_{at}": by["OpenMP"] / by["helpers"] for at, by in mean.items()},
        settings={"steps": STEPS, "pause": PAUSE, **vars(args)},
        repeats=results,
    )


if __name__ == "__main__":
    main()
