"""Cost of placing a request, by the number of engines.

Every prompt begins with 128 common tokens. It is placed when it is new, again, and as the next turn of its session,
which is 64 tokens longer. Cases take turns. Each figure is the median over the prompts of the fastest of some rounds,
so that other processes on the machine disturb it little. The first case runs twice: the ratio of the two is the noise.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from services.frontend.placement import Condition, EngineReport, Placement
from tests.benchmarks.support.report import report

BLOCK_SIZE = 16
COMMON, TURN = 128, 64
PROMPTS, KEY = 200, 1


class Case(NamedTuple):
    policy: str
    engines: int
    tokens: int


def build(case: Case) -> Placement:
    placement = Placement(case.policy)
    for number in range(case.engines):
        placement.on_engine(f"engine-{number}", EngineReport(Condition.READY, "m", 0.0, BLOCK_SIZE, 1e-4))
    return placement


def place_all(placement: Placement, prompts: Sequence[bytes]) -> list[float]:
    """Return the seconds of each placement."""
    found = []
    for tokens in prompts:
        began = time.perf_counter()
        placement.place(KEY, tokens)
        found.append(time.perf_counter() - began)
        placement.on_ended(KEY)
    return found


def round_of(case: Case) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of each placement: new, again, next turn."""
    common = os.urandom(4 * COMMON)
    prompts = [common + os.urandom(4 * (case.tokens - COMMON)) for _ in range(PROMPTS)]
    placement = build(case)
    new, again = place_all(placement, prompts), place_all(placement, prompts)
    return new, again, place_all(placement, [tokens + os.urandom(4 * TURN) for tokens in prompts])


def microseconds(rounds: Sequence[Sequence[float]]) -> float:
    return 1e6 * statistics.median(map(min, zip(*rounds, strict=True)))


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 16, 1000])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 12288])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    cases = [Case("prefix_aware", engines, tokens) for engines in args.engines for tokens in args.tokens]
    cases += [Case(policy, 1000, 1024) for policy in ("least_loaded", "round_robin")]
    cases.append(cases[0])
    rounds = [[round_of(case) for case in cases] for _ in range(args.rounds)]
    rows: list[dict[str, object]] = []
    for at, case in enumerate(cases):
        new, again, turn = (microseconds([turns[at][part] for turns in rounds]) for part in range(3))
        rows.append({**case._asdict(), "new, us": new, "again, us": again, "next turn, us": turn})
    report(
        "placement",
        title="microseconds of a placement",
        rows=rows,
        figures={
            "the first case, second time / first time": float(str(rows[-1]["new, us"])) / float(str(rows[0]["new, us"]))
        },
        settings={**vars(args), "block_size": BLOCK_SIZE, "prompts": PROMPTS},
        repeats=rounds,
    )
