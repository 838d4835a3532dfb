"""Decode of one stream against the memory that it must read.

A decode step of one row reads every weight once. The floor is the bytes of the weights over the read bandwidth that as
many threads reach in the same process; the figure is the floor over the time of a step. The step is the native runner's
whole step, without scheduler and sockets. Bandwidth and steps are measured in turns.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from protocol.membership import Shard
from services.config import WorkerConfig
from services.worker.backends.native.memory import rank_memory
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.partition import ModelPart
from services.worker.kernels.selection import TILES, processor_features
from tests.benchmarks.support.planned_batch import BLOCK_SIZE
from tests.benchmarks.support.random_llama import SHAPES, VOCAB, random_llama
from tests.benchmarks.support.report import add_ints, report
from tests.benchmarks.support.static_batch import StaticBatch

READ_BYTES = 1 << 30
"""Bytes of the array that is read; far larger than the caches."""
Weights = Literal["none", "int8", "int4"]
Mode = Literal["balanced", "throughput"]


def read_bandwidth(array: torch.Tensor) -> float:
    """Return bytes per second of the best of three sums."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        array.sum()
        seconds.append(time.perf_counter() - began)
    return array.nbytes / min(seconds)


def weight_bytes(config: WorkerConfig, path: Path) -> int:
    """Return the bytes that a decode step reads. The embedding is read only as the head, to which it is tied."""
    model = ModelConfig.from_checkpoint(path)
    memory = rank_memory(config, path, ModelPart.from_shard(model, Shard()), BLOCK_SIZE).weights
    is_counted_once = config.quantization != "none"
    return memory - (0 if is_counted_once else model.vocab_size * model.hidden_size * 2)


def measured(path: Path, weights: Weights, mode: Mode, args: argparse.Namespace) -> dict[str, object]:
    """Return the figures of one model with weights of one kind: medians."""
    config = WorkerConfig(
        model=str(path), dtype="bfloat16", threads=args.threads, quantization=weights, performance_mode=mode
    )
    batch = StaticBatch(config, 1, args.prompt, args.output)
    array = torch.ones(READ_BYTES // 4)
    tokens = np.random.default_rng(0).integers(2, VOCAB, (1, args.prompt), np.int32)
    batch.run(tokens)  # warm-up
    steps, rates = [], []
    for _ in range(args.repeats):
        torch.set_num_threads(args.threads)
        rates.append(read_bandwidth(array))
        batch.run(tokens)
        steps.append(batch.decode_s / (args.output - 1))
    size, step, rate = weight_bytes(config, path), statistics.median(steps), statistics.median(rates)
    return {
        "weights": ("bfloat16" if weights == "none" else weights) + (f", {mode}" if mode != "balanced" else ""),
        "MB": size / 1e6,
        "read GB/s": rate / 1e9,
        "floor ms": size / rate * 1e3,
        "step ms": step * 1e3,
        "least ms": min(steps) * 1e3,
        "floor / step": size / rate / step,
    }


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=["m155"], help=f"random models: {', '.join(SHAPES)}")
    add_ints(parser, threads=2, prompt=16, output=64, repeats=5)
    args = parser.parse_args()
    kinds: list[tuple[Weights, Mode]] = [("none", "balanced"), ("int8", "balanced"), ("int4", "balanced")]
    if TILES in processor_features():  # the mode chooses other kernels
        kinds += [("int8", "throughput"), ("int4", "throughput")]
    rows = [{"model": name, **measured(random_llama(name), *kind, args)} for name in args.models for kind in kinds]
    report(
        "decode_bandwidth",
        title=f"decode of one stream, {args.threads} threads: medians of {args.repeats}",
        rows=rows,
        figures={f"{row['model']} {row['weights']}": row["floor / step"] for row in rows},
        settings=vars(args),
        repeats=[],
    )
