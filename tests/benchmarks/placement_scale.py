"""Placement policies at the scale of a large service, SIMULATED: the production core on a virtual clock.

Many frontends, each with a core of its own, place requests of sessions on simulated engines. The distributions and
their source are in tests/simulation/placement/workload.py, the model of the engines is in engines.py beside it. In the
middle of the run a tenth of the engines dies at once and comes back two minutes later with empty caches. Later some
engines stall, and some frontends are cut off from a fifth of the engines for half a minute. The table compares policies
on the same requests. One with `+events` gets the engines' KV events; without them a frontend knows what it has placed
itself.
"""

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from tests.benchmarks.support.report import add_ints, report
from tests.simulation.placement.one_cache import hit_share
from tests.simulation.placement.workload import WorkloadShape, requests
from tests.simulation.placement.world import FleetFault, FleetSetting, FleetWorld

ENGINE_TOKENS = 1_000_000
"""Tokens in the KV cache of an engine."""


POLICIES = ("prefix_aware+events", "least_loaded", "round_robin", "cache_aware", "cache_aware+events")


def faults(engines: int, frontends: int, seconds: float) -> tuple[FleetFault, ...]:
    tenth = max(1, engines // 10)
    cut = range(3 * tenth, 5 * tenth)
    return (
        FleetFault(0.5 * seconds, "die", range(tenth), 120.0),
        FleetFault(0.65 * seconds, "stall", range(tenth, tenth + tenth // 2), 30.0),
        FleetFault(0.8 * seconds, "partition", cut, 30.0, range(max(1, frontends // 10))),
    )


def run(
    policy: str, shape: WorkloadShape, engines: int, frontends: int, max_blocks: int, one: float
) -> dict[str, object]:
    began = time.process_time()
    seconds = shape.requests / shape.per_second
    plan = faults(engines, frontends, seconds)
    blocks = ENGINE_TOKENS // shape.block_size
    name, _, events = policy.partition("+")
    setting = FleetSetting(
        name, engines, frontends, blocks, shape.block_size, max_blocks, events == "events", faults=plan
    )
    result = FleetWorld(setting, 1).run(requests(shape, 1))
    stayed = result.computed[plan[0].engines.stop :]
    return {
        "policy": policy,
        "hits": result.hit_tokens / result.prompt_tokens,
        "of one cache": result.hit_tokens / result.prompt_tokens / one,
        "TTFT mean, s": float(np.mean(result.ttft)),
        "p50, s": result.p(50),
        "p99, s": result.p(99),
        "least / mean engine": float(stayed.min() / stayed.mean()),
        "most / mean engine": float(stayed.max() / stayed.mean()),
        "lost": shape.requests - len(result.ttft),
        "moved": result.moved,
        "p99 back after, s": result.recovery_seconds(plan[0].at),
        "decisions": dict(result.reasons),
        "processor s": time.process_time() - began,
    }


def main(parser: argparse.ArgumentParser) -> None:
    add_ints(parser, engines=1000, frontends=100, requests=1_000_000, block_size=4096)
    parser.add_argument("--per-engine", type=float, default=0.4, help="requests per second and engine")
    parser.add_argument("--max-blocks", type=int, default=2**18, help="names in the index of a frontend")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    args = parser.parse_args()
    shape = WorkloadShape(args.requests, args.per_engine * args.engines, block_size=args.block_size)
    one = hit_share(requests(shape, 1), args.engines * (ENGINE_TOKENS // shape.block_size), shape.block_size)
    print(f"one cache with the memory of all engines: {one:.3f} of the prompt tokens", flush=True)
    rows = []
    with ProcessPoolExecutor(args.processes) as pool:
        runs = [
            pool.submit(run, policy, shape, args.engines, args.frontends, args.max_blocks, one)
            for policy in args.policies
        ]
        for done in runs:
            rows.append(done.result())
            print(rows[-1], flush=True)
    report(
        "placement_scale",
        title="simulated engines",
        rows=[{name: value for name, value in row.items() if name not in ("decisions", "processor s")} for row in rows],
        figures={"hits of one cache": one},
        settings=vars(args),
        repeats=rows,
    )
