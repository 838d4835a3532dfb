"""What penalties and log-probabilities cost: step time of the native backend when 64 of 256 requests ask for them.

Batches that differ in nothing else decode step by step in turn, in one process, so that a noisy moment meets all; the
time of a step includes that of making its result. Decoding is greedy, and all rows have the same lengths.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from protocol.sampling import SamplingParams
from protocol.steps import NewRequest
from services.cli.bench.load import prompts
from services.config import BenchConfig, WorkerConfig
from tests.benchmarks.support.random_llama import SHAPES, random_llama
from tests.benchmarks.support.report import report
from tests.benchmarks.support.static_batch import I32, StaticBatch

PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2}


class Decoding(StaticBatch):
    """A static batch that is decoded one step at a time."""

    def steps(self, tokens: I32, params: list[SamplingParams]) -> Iterator[float]:
        """Prefills `tokens`, int32[batch, prompt]; then yields the seconds of each step that decodes."""
        slots = np.arange(self.batch, dtype=np.int32)
        self.wave += 1
        table = np.arange(self.batch * self.blocks, dtype=np.int32).reshape(self.batch, self.blocks)
        new = [
            NewRequest(
                slot, self.wave, tokens[slot].tobytes(), self.prompt, table[slot].tobytes(), params[slot]
            )
            for slot in range(self.batch)
        ]
        starts = np.zeros_like(slots)
        self._step(slots, starts, starts + self.prompt, new)
        for position in range(self.prompt, self.prompt + self.output - 1):
            began = time.perf_counter()
            self._step(slots, starts + position, np.ones_like(slots), [])
            yield time.perf_counter() - began
        self.runner.release(slots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="m4", help=f"a directory, or a random model: {', '.join(SHAPES)}")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    for name, default in (
        ("threads", 2), ("batch", 256), ("asking", 64), ("logprobs", 5), ("prompt", 128), ("output", 64), ("waves", 2),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    model = random_llama(args.model) if args.model in SHAPES else Path(args.model)
    asked: dict[str, dict[str, object]] = {
        "nothing": {},
        "penalties": PENALTIES,
        "logprobs": {"logprobs": args.logprobs},
        "penalties and logprobs": {**PENALTIES, "logprobs": args.logprobs},
    }
    config = WorkerConfig(model=str(model), dtype=args.dtype, threads=args.threads)
    batches = {name: Decoding(config, args.batch, args.prompt, args.output) for name in asked}
    load = BenchConfig(random_input_len=args.prompt, random_output_len=args.output)
    rows = np.array(prompts(load, args.batch * args.waves, load.seed), np.int32)
    seconds: dict[str, list[float]] = {name: [] for name in asked}
    every = args.batch // args.asking
    for wave in range(args.waves):
        tokens = rows[wave * args.batch : (wave + 1) * args.batch]
        turns = {}
        for name, values in asked.items():
            params = [
                SamplingParams(
                    max_tokens=args.output, temperature=0.0, **(values if slot % every == 0 else {})
                )
                for slot in range(args.batch)
            ]
            turns[name] = batches[name].steps(tokens, params)
        names = list(turns)
        for _ in range(args.output - 1):
            for name in names:
                seconds[name].append(next(turns[name]))
            names.append(names.pop(0))  # nobody is always after the same one
        for turn in turns.values():
            assert next(turn, None) is None
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    plain = seconds["nothing"]
    over = {
        name: statistics.median(ours / other for ours, other in zip(times, plain, strict=True))
        for name, times in seconds.items()
    }
    report(
        "sampling_parameters",
        title=f"{args.model}, {args.dtype}, {args.threads} threads: {args.asking} of {args.batch} requests ask for",
        rows=[
            {"what": name, "decode step, ms": medians[name] * 1000, "over nothing": over[name]}
            for name in asked
        ],
        figures={"over_nothing": over, "step_ms": {name: value * 1000 for name, value in medians.items()}},
        settings={**vars(args), "model": str(model)},
        repeats={name: [round(value * 1000, 4) for value in times] for name, times in seconds.items()},
    )


if __name__ == "__main__":
    main()
