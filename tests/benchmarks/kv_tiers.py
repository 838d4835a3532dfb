"""Costs and gains of tiers of KV blocks: tiers off, in memory of the host, and on disk.

1. Nothing is found: every prompt is new, so that tiers only cost what writing their blocks costs.
   `--new-only --repeats 7` measures this alone, and compares the defaults with memory that does not outlive the worker,
   and with blocks without names: what these cost where nothing is used.
2. Prompts come again whose tokens are several times those of the cache: without tiers each one is computed again.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from services.process import processor_seconds
from tests.benchmarks.peers import packaged_gguf
from tests.benchmarks.support.report import add_ints, report
from tests.benchmarks.support.servers import ServerProcess, runahead_process, served

BLOCK = 16
NO_KEEPER = (
    "import contextlib, sys, services.cli.serve as serve\n"
    "serve.keeping = lambda *_: contextlib.nullcontext({})\n"
    "from services.cli import main\n"
    "sys.exit(main())"
)
"""Runs `serve` whose workers have memory of their own for the KV cache."""
Start = Callable[[], AbstractContextManager[ServerProcess]]
Figures = dict[str, float]


def repeated(start: Start, args: argparse.Namespace) -> list[Figures]:
    """Ask for all prompts in turn, several times. Return tokens of prompts and outputs per second, and mean seconds to
    the first token. The first pass, which computes all, is not returned."""
    waves = round(args.times * args.cache_tokens / args.input_len / args.streams)
    with start() as server:
        loads = [
            served(server.url, args.streams, args.input_len, args.output_len, waves, warmups=0)
            for _ in range(args.passes + 1)
        ]
    return [
        {"tokens_per_second": load["total_token_throughput"], "ttft": load["mean_ttft_ms"] / 1e3} for load in loads[1:]
    ]


def new_prompts(start: Start, args: argparse.Namespace) -> Figures:
    """Return tokens of outputs per second, and the server's processor time for each of them. No prompt comes again."""
    with start() as server:

        def used() -> float:
            return processor_seconds() - time.process_time()  # without this client

        before = used()
        load = served(server.url, args.streams, args.input_len // 4, args.new_output_len, args.waves)
        tokens = args.streams * args.waves * args.new_output_len
        return {"tokens_per_second": load["output_throughput"], "processor_us": 1e6 * (used() - before) / tokens}


def median(found: Sequence[Figures], figure: str, digits: int) -> Any:
    return round(statistics.median(one[figure] for one in found), digits) if found else ""


def main(parser: argparse.ArgumentParser) -> None:
    add_ints(parser, streams=2, threads=2, input_len=1000, output_len=16, new_output_len=128)
    add_ints(parser, waves=6, cache_tokens=4096, times=3, passes=2, repeats=3)
    parser.add_argument("--new-only", action="store_true", help="only the loads whose prompts are new")
    args = parser.parse_args()
    context = args.input_len + args.output_len + args.new_output_len

    def ours(*flags: str, run: Sequence[str] = ("-m", "services.cli")) -> Start:
        return lambda: runahead_process(
            packaged_gguf(), f"--threads={args.threads}", f"--max-model-len={context}",
            f"--num-gpu-blocks-override={args.cache_tokens // BLOCK}", *flags, run=run,
        )  # fmt: skip

    with tempfile.TemporaryDirectory(prefix="runahead-tiers-") as directory:
        kinds: dict[str, tuple[str, ...]] = {
            "off": (),
            "host": ("--kv-offload-bytes=4G",),
            "disk": (f"--kv-offload-dir={directory}/kv",),
        }
        unused: dict[str, Start] = {}
        if args.new_only:
            unused = {"no keeper": ours(run=("-c", NO_KEEPER)), "no names": ours("--no-enable-prefix-caching")}
        new: dict[str, list[Figures]] = {kind: [] for kind in (*kinds, *unused)}
        again: dict[str, list[Figures]] = {kind: [] for kind in kinds}
        for _ in range(args.repeats):
            for kind, flags in kinds.items():
                new[kind].append(new_prompts(ours(*flags), args))
                if not args.new_only:
                    again[kind] += repeated(ours(*flags), args)
            for kind, start in unused.items():
                new[kind].append(new_prompts(start, args))
    rows: list[dict[str, Any]] = [
        {
            "tiers": kind,
            "new prompts: tokens/s": median(new.get(kind, ()), "tokens_per_second", 1),
            "new prompts: processor us/token": median(new.get(kind, ()), "processor_us", 1),
            "again: tokens/s": median(again.get(kind, ()), "tokens_per_second", 0),
            "again: TTFT, s": median(again.get(kind, ()), "ttft", 3),
        }
        for kind in (new | again)
    ]
    off = rows[0]
    figures = {
        f"{kind} against off": {
            "cost without hits, %": round(100 * (1 - row["new prompts: tokens/s"] / off["new prompts: tokens/s"]), 1),
            "tokens/s again": round(row["again: tokens/s"] / off["again: tokens/s"], 2),
            "TTFT again": round(row["again: TTFT, s"] / off["again: TTFT, s"], 3),
        }
        for kind, row in zip(new | again, rows, strict=True)
        if kind in ("host", "disk") and not args.new_only
    }
    figures |= {
        f"defaults against {row['tiers']}": {
            "cost, %": round(100 * (1 - off["new prompts: tokens/s"] / row["new prompts: tokens/s"]), 1),
            "processor time, %": round(
                100 * (off["new prompts: processor us/token"] / row["new prompts: processor us/token"] - 1), 1
            ),
        }
        for row in rows
        if row["tiers"] in unused
    }
    title = f"prompts of {args.input_len} tokens, {args.times} times the cache of {args.cache_tokens}: medians"
    report("kv_tiers", title, rows, figures, vars(args), {"new": new, "again": again})
