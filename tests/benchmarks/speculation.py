"""Effect of drafts: tokens/s of the demo model with and without them, greedy, at several numbers of streams.

The prompts are parts of `prose_and_code.txt`; the model ends the outputs. A further comparison has random prompts with
a high temperature, where drafts fail. Engines of a comparison exist at the same time and run in turn, so that noise of
the machine affects all; the engine without drafts exists twice. With `--fixed`, every fixed number of drafts is an
engine too, and `of_best_fixed` compares the chosen number with the best of them.
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from protocol.sampling import SamplingParams
from services.checkpoint import DEMO_MODEL
from tests.benchmarks.support.engine_client import BenchmarkClient, engine
from tests.benchmarks.support.report import add_ints, report

TEXT = Path(__file__).parent / "prose_and_code.txt"
EOS = 2
CONCURRENCY = (1, 4, 8, 16, 32)
PLAIN, CONTROL = "none", "none again"
"""Names of two equal engines. The ratio between them shows the noise of the machine."""
PROMPTS_PER_RUN = 8
"""Prompts of one run of an engine per stream, before the next engine runs. A run takes some seconds, to alternate
often. Its first quarter is not measured: the number of drafts follows load and text within a second."""
Prompts = Sequence[np.ndarray]


class EngineRun(NamedTuple):
    """One run of an engine over some prompts."""

    seconds: float
    tokens: int
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


Runs = Mapping[int, Mapping[str, Sequence[EngineRun]]]
"""Concurrency -> method -> runs. Runs with the same index followed each other and had the same prompts."""


def text_prompts(number: int, size: int) -> list[np.ndarray]:
    """Return parts of the text with `size` tokens each, evenly spread; int32[size] each."""
    ids = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(TEXT.read_text()).ids
    starts = np.linspace(0, len(ids) - size, number).astype(int)
    return [np.array(ids[start : start + size], np.int32) for start in starts]


def random_prompts(number: int, size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(300, 4096, size).astype(np.int32) for _ in range(number)]


def speculative(methods: Mapping[str, int], adaptive: bool) -> dict[str, dict[str, object]]:
    """Return the scheduler's settings by method. `methods` has the number of drafts of each."""
    heads = {"eagle": {"model": str(DEMO_MODEL / "eagle")}}
    configs = {
        method: {"method": method, "num_speculative_tokens": k, "adaptive": adaptive, **heads.get(method, {})}
        for method, k in methods.items()
    }
    return {method: {"speculative_config": json.dumps(config)} for method, config in configs.items()}


def fixed_numbers(methods: Mapping[str, int]) -> dict[str, dict[str, object]]:
    """Return the settings of an engine for every method and fixed number of drafts."""
    return {
        f"{method}, always {k}": speculative({method: k}, adaptive=False)[method]
        for method, most in methods.items()
        for k in range(1, most + 1)
    }


def run_prompts(client: BenchmarkClient, prompts: Prompts, concurrency: int, params: SamplingParams) -> EngineRun:
    """Run all prompts with `concurrency` open requests. Measure from the end of the first quarter of them on."""
    done, first, sent = client.finished, len(prompts) // 4, 0
    began, tokens, before = 0.0, 0, 0
    while client.finished - done < len(prompts):
        if client.finished - done <= first:
            began, tokens, before = time.monotonic(), client.tokens, len(client.finishes)
        while sent < len(prompts) and sent - (client.finished - done) < concurrency:
            client.generate(prompts[sent], sent, 0, params=params)
            sent += 1
        client.receive()
    seconds, finishes = time.monotonic() - began, client.finishes[before:]
    drafted, accepted = (
        sum(getattr(finish, f"num_{what}_tokens") for finish in finishes) for what in ("draft", "accepted")
    )
    return EngineRun(seconds, client.tokens - tokens, drafted, accepted)


def compared(
    engines: Mapping[str, Mapping[str, object]], prompts: Prompts, params: SamplingParams, args: argparse.Namespace
) -> Runs:
    """Run all engines in turn with the same prompts, then with the next ones."""
    runs: dict[int, dict[str, list[EngineRun]]] = {c: {name: [] for name in engines} for c in args.streams}
    worker = {"threads": args.threads, "kv_cache_memory_bytes": 256 << 20}
    with ExitStack() as stack:
        clients = {name: stack.enter_context(engine(settings, worker)) for name, settings in engines.items()}
        for client in clients.values():  # a warm-up, in which the number of drafts adapts
            run_prompts(client, prompts[:4], 4, params)
        for _ in range(args.repeats):
            for concurrency in args.streams:
                several = list(islice(cycle(prompts), max(len(prompts), PROMPTS_PER_RUN * concurrency)))
                size = PROMPTS_PER_RUN * max(concurrency, 2)
                for first in range(0, len(several), size):
                    for name, client in clients.items():
                        run = run_prompts(client, several[first : first + size], concurrency, params)
                        runs[concurrency][name].append(run)
    return runs


def over_none(runs: Mapping[str, Sequence[EngineRun]], method: str) -> float:
    """Return the median ratio of tokens/s between neighbouring runs with and without drafts."""
    return statistics.median(ours.rate / none.rate for ours, none in zip(runs[method], runs[PLAIN], strict=True))


def of_best_fixed(runs: Runs, method: str) -> dict[str, float]:
    """Return by concurrency the tokens/s of the chosen number over those of the best fixed one, none included."""
    return {
        str(concurrency): over_none(by_name, method)
        / max(over_none(by_name, name) for name in by_name if name in (PLAIN, CONTROL) or f"{method}, " in name)
        for concurrency, by_name in runs.items()
    }


def totals(runs: Sequence[EngineRun]) -> dict[str, float]:
    """Return the metrics of all runs together."""
    seconds, tokens, drafted, accepted = map(sum, zip(*runs, strict=True))
    return {
        "tokens_per_s": tokens / seconds,
        "acceptance": accepted / drafted if drafted else 0.0,
        "tokens_per_row": tokens / (tokens - accepted),
    }


def main(parser: argparse.ArgumentParser) -> None:
    add_ints(parser, threads=0, repeats=3, prompts=48, input_len=96, output_len=128, eagle=3, ngram=5)
    parser.add_argument("--streams", type=int, nargs="+", default=CONCURRENCY)
    parser.add_argument("--fixed", action="store_true", help="compare with every fixed number of drafts too")
    args = parser.parse_args()
    methods = {method: k for method, k in (("eagle", args.eagle), ("ngram", args.ngram)) if k}
    fixed = fixed_numbers(methods) if args.fixed else {}
    engines = {PLAIN: {}, **speculative(methods, adaptive=True), **fixed, CONTROL: {}}
    greedy = SamplingParams(args.output_len, temperature=0.0, eos_token_ids=(EOS,))
    hot = SamplingParams(args.output_len, temperature=1.5, seed=1)
    text = text_prompts(args.prompts, args.input_len)
    good = compared(engines, text, greedy, args)
    adaptive = {name: settings for name, settings in engines.items() if name not in fixed}
    bad = compared(adaptive, random_prompts(args.prompts, args.input_len), hot, args)
    speedup = {m: {str(c): over_none(good[c], m) for c in args.streams} for m in methods}
    floor = {m: {str(c): over_none(bad[c], m) for c in args.streams} for m in methods}
    rows = [
        {
            "prompts": kind,
            "concurrency": concurrency,
            "drafts by": f"{name}, up to {methods[name]}" if name in methods else name,
            **totals(runs[concurrency][name]),
            "over none": over_none(runs[concurrency], name),
        }
        for kind, runs in (("text", good), ("random, sampled", bad))
        for concurrency in args.streams
        for name in runs[concurrency]
    ]  # fmt: skip
    report(
        "speculation",
        title=f"demo model, compute threads: {args.threads} (0: one per core); over none: medians of neighbours",
        rows=rows,
        figures={
            "speedup_by_concurrency": speedup,
            **({"of_best_fixed": {m: of_best_fixed(good, m) for m in methods}} if fixed else {}),
            "adaptive_floor_by_method": floor,
            "control": {"text": {str(c): over_none(good[c], CONTROL) for c in args.streams}},
        },
        settings={"drafts": methods, "adaptive": True, "prompts_per_run": PROMPTS_PER_RUN, **vars(args)},
        repeats={"text": good, "random": bad},
    )
