"""The soak in named parts, each of which goes on where it was interrupted: `python -m tests.soak [--long] [PART]`.

How far each part has run is in build/soak/PART.json. The exit status is 1 if something has failed.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from tests.simulation.whole.seeds import SeedFailed, run_seeds
from tests.soak.progress import Progress
from tests.soak.replayed import replayed
from tests.soak.served import FAULTS_PIECE, long_prompts, random_faults
from tests.soak.tiers import TIERS_PIECE, tier_faults

Result = tuple[Counter[str], list[str]]
Piece = Callable[[int, int], Result]
"""(first unit, number of units) -> what has happened, what has failed."""
SEEDS_PER_PROCESS = 100
SUITES = (
    "tests/unit/protocol", "tests/simulation", "tests/integration", "tests/ranks", "tests/e2e/test_api_document.py",
    "tests/e2e/test_recovery.py", "tests/e2e/test_many_ranks.py", "tests/e2e/test_poison.py",
    "tests/e2e/test_partitions.py",
)  # fmt: skip
BODIES = ("tests/integration/frontend/test_fuzz.py", "tests/e2e/test_abuse.py")
ABUSE = ("tests/e2e/test_abuse.py", "tests/e2e/test_api_document.py")
RECOVERY = (
    "tests/ranks/test_recovery.py", "tests/e2e/test_recovery.py", "tests/e2e/test_poison.py",
    "tests/e2e/test_partitions.py",
)  # fmt: skip
ENGINES = ("tests/e2e/test_engines.py", "tests/e2e/test_engine_links.py", "tests/e2e/test_roles.py")


def _chunk(seeds: range) -> Result:
    happened, failures = Counter[str](), list[str]()
    for seed in seeds:
        try:
            happened.update(run_seeds([seed]))
        except SeedFailed as failed:
            failures.append(str(failed))
    return happened, failures


def simulated_seeds(first: int, count: int) -> Result:
    """Run seeds of the whole simulation on all processors."""
    happened, failures = Counter[str](), list[str]()
    end = first + count
    chunks = [range(at, min(at + SEEDS_PER_PROCESS, end)) for at in range(first, end, SEEDS_PER_PROCESS)]
    with ProcessPoolExecutor(int(os.environ.get("RUNAHEAD_SOAK_PROCESSES", os.cpu_count() or 1))) as pool:
        for found, failed in pool.map(_chunk, chunks):
            happened.update(found)
            failures += failed
    return happened, failures


def served(run: Callable[[float, int], Coroutine[Any, Any, Result]]) -> Piece:
    """Run a server for so many seconds."""
    return lambda first, count: asyncio.run(run(float(count), first))


def suite(*paths: str, python: str = sys.executable, **environment: str) -> Piece:
    """Run tests with all that a change leaves out."""

    def run(first: int, count: int) -> Result:
        command = [python, "-m", "pytest", "-m", "", "--timeout=7200", "-p", "no:cacheprovider", *paths]
        ended = subprocess.run(command, env={**os.environ, "RUNAHEAD_SOAK": "1", **environment}, check=False)
        return Counter({"runs of pytest": 1}), [f"{' '.join(paths)}: see above"] if ended.returncode else []

    return run


class Part(NamedTuple):
    run: Piece
    unit: str
    of: int
    """Units in `make soak`; 0: only in `make soak-long`."""
    long: int
    """Units in `make soak-long`."""
    piece: int
    """Units between two times that the progress is stored."""
    is_timed: bool = False
    """A piece counts the seconds that it took."""


PARTS = {
    "seeds": Part(simulated_seeds, "seeds", 50_000, 1_000_000, 1_000),
    "bodies": Part(suite(*BODIES), "s", 600, 3600, 1, is_timed=True),
    "probes": Part(served(long_prompts), "s", 600, 3600, 300),
    "faults": Part(served(random_faults), "s", 1800, 86_400, FAULTS_PIECE),
    "tiers": Part(served(tier_faults), "s", 600, 3600, TIERS_PIECE),
    "replay": Part(
        replayed(lambda directory: suite(*ABUSE, RUNAHEAD_SOAK="", RUNAHEAD_SOAK_RECORD=directory)(0, 1)),
        "s", 600, 3600, 1, is_timed=True,
    ),
    "recovery": Part(suite(*RECOVERY), "runs", 1, 1, 1),
    "engines": Part(suite(*ENGINES), "runs", 1, 1, 1),
    "vllm": Part(suite("tests/vllm", python=".venv-vllm/bin/python"), "runs", 1, 1, 1),
    "suites": Part(suite(*SUITES), "runs", 0, 1, 1),
}  # fmt: skip


def run_part(name: str, is_long: bool) -> Progress:
    part = PARTS[name]
    progress = Progress.resumed(f"{name}-long" if is_long else name, part.long if is_long else part.of, part.unit)
    while progress.left > 0:
        began, count = time.monotonic(), int(min(part.piece, progress.left))
        happened, failures = part.run(int(progress.done), count)
        took = time.monotonic() - began
        progress.add(max(1.0, took) if part.is_timed else count, took, happened, failures)
        print(progress, flush=True)
        for failure in failures:
            print(failure, flush=True)
    return progress


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("part", nargs="?", choices=sorted(PARTS))
    parser.add_argument("--long", action="store_true")
    args = parser.parse_args()
    names = [args.part] if args.part else [name for name, part in PARTS.items() if args.long or part.of]
    done = [run_part(name, args.long) for name in names]
    print(*done, sep="\n")
    return int(any(progress.failures for progress in done))


if __name__ == "__main__":
    sys.exit(main())
