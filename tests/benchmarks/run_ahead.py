"""Effect of run-ahead: throughput, and the share of time in which the worker is idle, at depth 1 and at depth 2.

`sim` (5 ms per step, 256 requests decoding) stands for a device; `native` runs a small model with one thread and
shares the CPU with the scheduler. The load comes over the scheduler's socket for frontends, without HTTP.
"""

import argparse
from collections.abc import Mapping

import numpy as np

from tests.benchmarks.support.engine_client import engine
from tests.benchmarks.support.random_llama import VOCAB, random_llama
from tests.benchmarks.support.report import add_ints, medians, report

PROMPT = 64


def run(
    depth: int, requests: int, output: int, scheduler: Mapping[str, object], worker: Mapping[str, object]
) -> dict[str, float]:
    """Return the metrics of one run."""
    rng = np.random.default_rng(0)
    limits = {"max_num_seqs": requests, "batch_queue_depth": depth, **scheduler}
    with engine(limits, worker) as client:
        for number in range(requests):  # different lengths, so that blocks fill in different steps
            tokens = rng.integers(300, 1000, PROMPT + number % 16).astype(np.int32)
            client.generate(tokens, number, output)
        while client.finished < requests:
            client.receive()
        return client.window(requests)


def main(parser: argparse.ArgumentParser) -> None:
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
    repeats: dict[str, dict[str, list[dict[str, float]]]] = {case: {"1": [], "2": []} for case in cases}
    for _ in range(args.repeats):  # alternate, so that noise of the machine affects both depths
        for case, (requests, output, limits, worker) in cases.items():
            for depth, runs in repeats[case].items():
                runs.append(run(int(depth), requests, output, limits, worker))
    median = {case: {depth: medians(runs) for depth, runs in by_depth.items()} for case, by_depth in repeats.items()}
    report(
        "run_ahead",
        title=f"run-ahead: medians of {args.repeats}",
        rows=[{"backend": case, "depth": depth, **each} for case in cases for depth, each in median[case].items()],
        figures={
            "idle_fraction": {
                case: {depth: each["idle_fraction"] for depth, each in median[case].items()} for case in cases
            },
            "throughput_ratio": {
                case: median[case]["2"]["tokens_per_s"] / median[case]["1"]["tokens_per_s"] for case in cases
            },
        },
        settings={"prompt": PROMPT, "vocab": VOCAB, **vars(args), "sim": sim, "native_worker": native},
        repeats=repeats,
    )
