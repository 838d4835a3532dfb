"""Cost of structured output: 256 requests on `sim` at 5 ms per step, 64 of them constrained, against the same batch
without constraints.

The load comes over the scheduler's socket for frontends, without HTTP. `throughput_ratio` compares the tokens per
second of all requests between the time when all have a token and the time when the first one has finished.
`neighbour_itl_ratio` compares the mean time between two tokens of the 192 requests that are never constrained.
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping

import numpy as np

from protocol.requests import FinishReason
from protocol.sampling import GrammarKind, StructuredOutputParams
from tests.benchmarks.support.engine_client import engine
from tests.benchmarks.support.report import add_ints, medians, report

RECORD = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
        "day": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "score": {"type": "number"},
        "valid": {"type": "boolean"},
    },
    "required": ["id", "kind", "day", "tags", "score", "valid"],
    "additionalProperties": False,
}
"""Schema without free text: in a string the simulator would draw noise for nearly every token, 64 times per step, which
takes longer than the step and is not a cost of the scheduler."""
SCHEMA = {"type": "array", "items": RECORD, "minItems": 1000}
"""Longer than any output here, so that a constrained request lasts as long as the others."""


def measure(
    constrained: int, requests: int, output: int, distinct: int, worker: Mapping[str, object]
) -> dict[str, float]:
    """Return the metrics of one run.

    Args:
        distinct: number of different schemas of the constrained requests.
    """
    rng = np.random.default_rng(0)
    limits: dict[str, object] = {"max_num_seqs": requests, "max_model_len": 2048, "block_size": 32}
    with engine(limits, worker) as client:
        for number in range(requests):  # different lengths, so that blocks fill in different steps
            tokens = rng.integers(300, 1000, 64 + number % 16).astype(np.int32)
            structured = None
            if number < constrained:
                schema = SCHEMA | {"title": f"schema {number % distinct}"}
                structured = StructuredOutputParams(GrammarKind.JSON, json.dumps(schema))
            client.generate(tokens, number, output, structured)
        arrivals: list[list[float]] = [[] for _ in range(requests)]
        while not client.finished:
            message = client.receive()
            if message is not None:
                now = time.monotonic()
                for finish in message.finished:
                    if finish.reason is not FinishReason.LENGTH:
                        raise SystemExit(f"request {finish.number}: {finish.reason.name} {finish.message}")
                for number in np.frombuffer(message.numbers, np.uint32).tolist():
                    arrivals[number].append(now)
    if any(len(times) < 100 for times in arrivals):
        raise SystemExit("a request has too few tokens; increase --output")
    start, end = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    within = [[at for at in times if start <= at <= end] for times in arrivals]
    neighbours = [times for times in within[-(requests - requests // 4) :] if len(times) > 1]
    return {
        "tokens_per_s": sum(map(len, within)) / (end - start),
        "neighbour_itl_ms": 1e3 * statistics.mean((t[-1] - t[0]) / (len(t) - 1) for t in neighbours),
        "neighbour_itl_p99_ms": 1e3 * float(np.percentile(np.concatenate([np.diff(t) for t in neighbours]), 99)),
        "seconds": end - start,
    }


def main(parser: argparse.ArgumentParser) -> None:
    add_ints(parser, repeats=3, requests=256, constrained=64)
    parser.add_argument("--distinct", type=int, default=8, help="number of different schemas")
    parser.add_argument("--output", type=int, default=1200, help="tokens per request")
    args = parser.parse_args()
    memory = args.requests * (args.output + 128) * 8  # bytes; the simulator stores a hash per position
    worker: dict[str, object] = {"backend": "sim", "sim_step_ms": 5.0, "kv_cache_memory_bytes": memory}
    cases = {"unconstrained": 0, "constrained": args.constrained}
    repeats: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(args.repeats):  # alternate, so that noise of the machine affects both
        for case, constrained in cases.items():
            repeats[case].append(measure(constrained, args.requests, args.output, args.distinct, worker))
    median = {case: medians(runs) for case, runs in repeats.items()}

    def ratio(name: str) -> float:
        return median["constrained"][name] / median["unconstrained"][name]

    report(
        "structured_output",
        title=f"structured output, {args.constrained} of {args.requests} constrained: medians of {args.repeats}",
        rows=[{"batch": case, **figures} for case, figures in median.items()],
        figures={
            "throughput_ratio": ratio("tokens_per_s"),
            "neighbour_itl_ratio": ratio("neighbour_itl_ms"),
            "neighbour_itl_p99_ratio": ratio("neighbour_itl_p99_ms"),
        },
        settings={**vars(args), "worker": worker},
        repeats=repeats,
    )
