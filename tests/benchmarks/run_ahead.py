"""Effect of run-ahead: the share of time in which the worker is idle, at depth 1 and at depth 2.

`sim` (5 ms per step, 256 requests decoding) stands for a device; `native` runs a small model with one thread and
shares the CPU with the scheduler. "2 recorded" is depth two with a client that receives step records. The load comes
over the scheduler's socket for frontends, without HTTP. The window is between the first and the last report of the
engine with all requests running.
"""

import argparse
import statistics
from collections.abc import Mapping

import numpy as np

from tests.benchmarks.support.engine_client import engine
from tests.benchmarks.support.random_llama import VOCAB, random_llama
from tests.benchmarks.support.report import report

DEPTHS = {"1": 1, "2": 2, "2 recorded": 2}


def measure(
    depth: int,
    recorded: bool,
    requests: int,
    prompt: int,
    output: int,
    scheduler: Mapping[str, object],
    worker: Mapping[str, object],
) -> dict[str, float]:
    """Return the metrics of one run at one depth. `recorded`: the client subscribes to step records."""
    rng = np.random.default_rng(0)
    limits = {"max_num_seqs": requests, "batch_queue_depth": depth, "log_level": "warning", **scheduler}
    with engine(limits, {"log_level": "warning", **worker}) as client:
        if recorded:
            client.subscribe()
        for number in range(requests):  # different lengths, so that blocks fill in different steps
            tokens = rng.integers(300, 1000, prompt + number % 16).astype(np.int32)
            client.generate(tokens, number, output)
        while client.finished < requests:
            client.receive()
        if recorded and not client.records:
            raise SystemExit("the engine sent no step records")
        full = [sample for sample in client.samples if sample.running == requests and sample.tokens]
    if len(full) < 3:
        raise SystemExit(f"{len(full)} reports with all requests running; the run is too short")
    first, last = full[0], full[-1]
    wall = last.at - first.at
    steps = last.steps - first.steps
    return {
        "idle_fraction": (last.idle - first.idle) / wall,
        "busy_fraction": (last.busy - first.busy) / wall,
        "tokens_per_s": (last.tokens - first.tokens) / wall,
        "step_ms": 1e3 * wall / steps,
        "seconds": wall,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--output", type=int, default=1200, help="tokens per request on sim")
    parser.add_argument("--native-requests", type=int, default=64)
    parser.add_argument("--native-output", type=int, default=512)
    args = parser.parse_args()
    memory = args.requests * (args.output + 128) * 8  # bytes; the simulator stores a hash per position
    sim = {"backend": "sim", "sim_step_ms": 5.0, "sim_vocab_size": 1024, "kv_cache_memory_bytes": memory}
    native = {"backend": "native", "model": str(random_llama("m4")), "threads": 1}
    cases = {
        "sim": (args.requests, args.output, {"max_model_len": 2048}, sim),
        "native": (args.native_requests, args.native_output, {}, native),
    }
    repeats: dict[str, dict[str, list[dict[str, float]]]] = {
        case: {depth: [] for depth in DEPTHS} for case in cases
    }
    for _ in range(args.repeats):  # alternate, so that noise of the machine affects both depths
        for case, (requests, output, limits, worker) in cases.items():
            for name, depth in DEPTHS.items():
                recorded = name.endswith("recorded")
                repeats[case][name].append(measure(depth, recorded, requests, 64, output, limits, worker))
    median = {
        case: {
            depth: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            for depth, runs in by_depth.items()
        }
        for case, by_depth in repeats.items()
    }

    def figure(case: str, name: str) -> dict[str, float]:
        return {depth: median[case][depth][name] for depth in median[case]}

    report(
        "run_ahead",
        title=f"run-ahead: medians of {args.repeats}",
        rows=[
            {"backend": case, "depth": depth, **median[case][depth]}
            for case in median
            for depth in median[case]
        ],
        figures={
            "idle_fraction": figure("sim", "idle_fraction"),
            "native": {name: figure("native", name) for name in ("idle_fraction", "tokens_per_s")},
            "throughput_ratio": {
                case: figure(case, "tokens_per_s")["2"] / figure(case, "tokens_per_s")["1"] for case in cases
            },
            "recorded_over_silent": {
                case: figure(case, "tokens_per_s")["2 recorded"] / figure(case, "tokens_per_s")["2"]
                for case in cases
            },
        },
        settings={
            "depths": list(DEPTHS),
            "prompt": 64,
            "vocab": VOCAB,
            **vars(args),
            "sim": sim,
            "native_worker": native,
        },
        repeats=repeats,
    )


if __name__ == "__main__":
    main()
