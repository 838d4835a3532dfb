"""Effect of run-ahead: the share of time in which the worker is idle, at depth 1 and at depth 2. Cost of being seen:
throughput at depth two with a subscriber of the step records, and with `--record`, over throughput without.

`sim` (5 ms per step, 256 requests decoding) stands for a device; `native` runs a small model with one thread and
shares the CPU with the scheduler. The load comes over the scheduler's socket for frontends, without HTTP;
`step_viewer` measures a frontend's ring and a viewer. "2 again" shows the noise.
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from services.scheduler.recording import EventRecording
from tests.benchmarks.support.engine_client import engine
from tests.benchmarks.support.random_llama import VOCAB, random_llama
from tests.benchmarks.support.report import add_ints, medians, report

PLAIN, PROMPT = "2", 64


class Variant(NamedTuple):
    depth: int
    subscribes: bool = False
    """The client receives step records."""
    records: bool = False
    """The scheduler writes a recording."""


VARIANTS = {
    "1": Variant(1),
    PLAIN: Variant(2),
    "2 again": Variant(2),
    "2, step records": Variant(2, subscribes=True),
    "2, --record": Variant(2, records=True),
}


def run(
    variant: Variant, requests: int, output: int, scheduler: Mapping[str, object], worker: Mapping[str, object]
) -> dict[str, float]:
    """Return the metrics of one run of a variant."""
    rng = np.random.default_rng(0)
    limits = {"max_num_seqs": requests, "batch_queue_depth": variant.depth, **scheduler}
    with tempfile.TemporaryDirectory(prefix="recording-") as directory:
        if variant.records:
            limits["record"] = directory
        with engine(limits, worker) as client:
            if variant.subscribes:
                client.subscribe()
            for number in range(requests):  # different lengths, so that blocks fill in different steps
                tokens = rng.integers(300, 1000, PROMPT + number % 16).astype(np.int32)
                client.generate(tokens, number, output)
            while client.finished < requests:
                client.receive()
            if variant.subscribes and not client.records:
                raise SystemExit("the engine sent no step records")
            metrics = client.window(requests)
        if variant.records and next(EventRecording(Path(directory)).records(), None) is None:
            raise SystemExit("the engine recorded nothing")
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_ints(parser, repeats=3, requests=256, native_requests=64, native_output=512)
    parser.add_argument("--output", type=int, default=1200, help="tokens per request on sim")
    parser.add_argument("--only", choices=["sim", "native"], help="one backend")
    args = parser.parse_args()
    memory = args.requests * (args.output + 128) * 8  # bytes; the simulator stores a hash per position
    sim = {"backend": "sim", "sim_step_ms": 5.0, "sim_vocab_size": 1024, "kv_cache_memory_bytes": memory}
    native = {"backend": "native", "model": str(random_llama("m4")), "threads": 1}
    cases = {
        "sim": (args.requests, args.output, {"max_model_len": 2048}, sim),
        "native": (args.native_requests, args.native_output, {}, native),
    }
    if args.only:
        cases = {args.only: cases[args.only]}
    repeats: dict[str, dict[str, list[dict[str, float]]]] = {case: {name: [] for name in VARIANTS} for case in cases}
    for _ in range(args.repeats):  # alternate, so that noise of the machine affects all variants
        for case, (requests, output, limits, worker) in cases.items():
            for name, variant in VARIANTS.items():
                repeats[case][name].append(run(variant, requests, output, limits, worker))
    median = {case: {depth: medians(runs) for depth, runs in by_depth.items()} for case, by_depth in repeats.items()}

    def figure(case: str, name: str) -> dict[str, float]:
        return {variant: median[case][variant][name] for variant in median[case]}

    speeds = {case: figure(case, "tokens_per_s") for case in cases}
    report(
        "run_ahead",
        title=f"run-ahead: medians of {args.repeats}",
        rows=[
            {"backend": case, "depth": variant, **metrics, "of depth 2": speeds[case][variant] / speeds[case][PLAIN]}
            for case in median
            for variant, metrics in median[case].items()
        ],
        figures={
            "idle_fraction": {case: figure(case, "idle_fraction") for case in cases},
            "throughput_ratio": {case: speeds[case][PLAIN] / speeds[case]["1"] for case in cases},
            "over_plain": {
                case: {
                    variant: speeds[case][variant] / speeds[case][PLAIN]
                    for variant in VARIANTS
                    if VARIANTS[variant].depth == 2 and variant != PLAIN
                }
                for case in cases
            },
        },
        settings={"prompt": PROMPT, "vocab": VOCAB, **vars(args), "sim": sim, "native_worker": native},
        repeats=repeats,
    )


if __name__ == "__main__":
    main()
