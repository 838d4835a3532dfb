"""Cost of penalties and log-probabilities: step time of the native backend when 64 of 256 requests use them.

Batches that differ in these parameters only decode one step each in turn, in one process, so that noise of the machine
affects all. The time of a step includes that of making its result. Decoding is greedy, and all rows have equal lengths.
"""

import argparse
import statistics
import time

import numpy as np

from protocol.sampling import SamplingParams
from services.cli.bench.load import prompts
from services.config import BenchConfig, WorkerConfig
from tests.benchmarks.support.random_llama import SHAPES, named_model
from tests.benchmarks.support.report import add_ints, report
from tests.benchmarks.support.static_batch import StaticBatch

PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2}


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="m4", help=f"a directory, or a random model: {', '.join(SHAPES)}")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    add_ints(parser, threads=2, batch=256, affected=64, logprobs=5, prompt=128, output=64, waves=2)
    args = parser.parse_args()
    model = named_model(args.model)
    cases: dict[str, dict[str, object]] = {
        "nothing": {},
        "penalties": PENALTIES,
        "logprobs": {"logprobs": args.logprobs},
        "penalties and logprobs": {**PENALTIES, "logprobs": args.logprobs},
    }
    config = WorkerConfig(model=str(model), dtype=args.dtype, threads=args.threads)
    batches = {name: StaticBatch(config, args.batch, args.prompt, args.output) for name in cases}
    load = BenchConfig(random_input_len=args.prompt, random_output_len=args.output)
    rows = np.array(prompts(load, args.batch * args.waves, load.seed), np.int32)
    times: dict[str, list[float]] = {name: [] for name in cases}
    every = args.batch // args.affected
    for wave in range(args.waves):
        tokens = rows[wave * args.batch : (wave + 1) * args.batch]
        for name, values in cases.items():
            params = [
                SamplingParams(max_tokens=args.output, temperature=0.0, **(values if slot % every == 0 else {}))
                for slot in range(args.batch)
            ]
            batches[name].prefill(tokens, params.__getitem__)
        names = list(cases)
        for _ in range(args.output - 1):
            for name in names:
                began = time.perf_counter()
                batches[name].decode(1, depth=1)
                times[name].append(time.perf_counter() - began)
            names.append(names.pop(0))  # no batch always follows the same one
    over = _over_nothing(times)
    report(
        "sampling_parameters",
        title=f"{args.model}, {args.dtype}, {args.threads} threads: {args.affected} of {args.batch} requests use",
        rows=[
            {"parameters": name, "decode step, ms": 1e3 * statistics.median(times[name]), "over nothing": over[name]}
            for name in cases
        ],
        figures={"over_nothing": over},
        settings={**vars(args), "model": str(model)},
        repeats={"elapsed_s": times},
    )


def _over_nothing(steps: dict[str, list[float]]) -> dict[str, float]:
    """Return the median over steps of the time relative to the neighbouring step without parameters."""
    return {
        name: statistics.median(ours / plain for ours, plain in zip(own, steps["nothing"], strict=True))
        for name, own in steps.items()
    }
