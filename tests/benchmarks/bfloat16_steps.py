"""Steps in bfloat16: our own products, by AVX-512 and by AMX, over oneDNN's, prefill and decode.

The native runner's whole steps on a static batch, without scheduler and sockets. The runners of all kinds are in one
process and take turns; the figures are ratios of the least times.
"""

import argparse
from collections.abc import Collection
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from services.cli.bench.load import prompts
from services.config import BenchConfig, WorkerConfig
from services.worker.kernels import selection
from tests.benchmarks.support.random_llama import SHAPES, random_llama
from tests.benchmarks.support.report import add_ints, report, skip
from tests.benchmarks.support.static_batch import StaticBatch

Times = dict[str, list[float]]
"""Name of the interval -> milliseconds of each turn."""


NAMES = {selection.PAIRS: "AVX-512", selection.TILES: "AMX"}


def own_features() -> list[str]:
    """Return the features with which our own kernels compute bfloat16 products here."""
    return [feature for feature in NAMES if feature in selection.processor_features()]


def static_batch(features: Collection[str], model: str, batch: int, args: argparse.Namespace) -> StaticBatch:
    """Return a loaded runner that uses no other features of the processor than these."""
    config = WorkerConfig(model=str(random_llama(model)), dtype="bfloat16", threads=args.threads)
    with patch.object(selection, "processor_features", lambda: frozenset(features)):
        return StaticBatch(config, batch, args.input_len, args.output_len)


def measure(model: str, batch: int, args: argparse.Namespace) -> dict[str, Times]:
    load = BenchConfig(random_input_len=args.input_len, random_output_len=args.output_len)
    tokens: NDArray[np.int32] = np.array(prompts(load, batch, load.seed), np.int32)
    kinds = {"oneDNN": {selection.ONEDNN_BFLOAT16}} | {NAMES[feature]: {feature} for feature in own_features()}
    batches = {name: static_batch(features, model, batch, args) for name, features in kinds.items()}
    times: dict[str, Times] = {name: {"prefill": [], "decode step": []} for name in kinds}
    for _ in range(args.repeats + 1):
        for name, runner in batches.items():
            torch.set_num_threads(args.threads if name == "oneDNN" else 1)  # as the runner's kernels wish
            runner.run(tokens)
            times[name]["prefill"].append(runner.prefill_s * 1e3)
            times[name]["decode step"].append(runner.decode_s * 1e3 / (args.output_len - 1))
    return {name: {what: turns[1:] for what, turns in found.items()} for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["m4", "m155", "m135"], choices=SHAPES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64])
    add_ints(parser, threads=2, input_len=128, output_len=32, repeats=3)
    args = parser.parse_args()
    if not own_features():
        skip("this processor has no bfloat16 arithmetic")
    cases = {f"{model} at {batch}": measure(model, batch, args) for model in args.models for batch in args.batches}
    rows: list[dict[str, object]] = []
    for case, kinds in cases.items():
        row: dict[str, object] = {"model, requests": case}
        for what in ("prefill", "decode step"):
            onednn = row[f"{what}, oneDNN, ms"] = min(kinds["oneDNN"][what])
            for name in map(NAMES.__getitem__, own_features()):
                own = min(kinds[name][what])
                row |= {f"{what}, {name}, ms": own, f"{what}, {name}, ratio": own / onednn}
        rows.append(row)
    report(
        "bfloat16_steps",
        title=f"bfloat16, {args.threads} threads, {args.input_len} in: least of {args.repeats} turns",
        rows=rows,
        figures={
            f"{what}, {name}": {str(row["model, requests"]): row[f"{what}, {name}, ratio"] for row in rows}
            for what in ("prefill", "decode step")
            for name in map(NAMES.__getitem__, own_features())
        },
        settings=vars(args),
        repeats=cases,
    )


if __name__ == "__main__":
    main()
