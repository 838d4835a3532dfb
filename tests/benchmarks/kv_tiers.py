"""Costs and gains of tiers of KV blocks: tiers off, in memory of the host, and on disk.

1. Nothing is found: every prompt is new, so that tiers only cost what writing their blocks costs.
2. Prompts come again whose tokens are several times those of the cache: without tiers each one is computed again.

llama.cpp's server (the same model and context, with and without its prompt cache in memory) runs the second load too,
if it was built (make bench NAME=peers). vLLM's offloading refuses processors without a GPU.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from openai import AsyncOpenAI

from tests.benchmarks.peers import packaged_gguf
from tests.benchmarks.support import llama_cpp
from tests.benchmarks.support.report import report
from tests.benchmarks.support.servers import ServerProcess, runahead_process, served

BLOCK, VOCAB = 16, 40_000
Start = Callable[[], AbstractContextManager[ServerProcess]]


class Pass(NamedTuple):
    """All prompts once."""

    tokens_per_second: float
    """Tokens of prompts and outputs."""
    ttft: float
    """Mean seconds to the first token."""


async def one(client: AsyncOpenAI, model: str, prompt: list[int], output_len: int) -> float:
    """Return the seconds to the first token of an answer, which is read to its end."""
    began, first = time.monotonic(), 0.0
    stream = await client.completions.create(
        model=model, prompt=prompt, max_tokens=output_len, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    async for _ in stream:
        first = first or time.monotonic() - began
    return first


async def passes(url: str, prompts: list[list[int]], args: argparse.Namespace) -> list[Pass]:
    """Ask for all prompts in turn, several times. The first pass, which computes all, is not returned."""
    found = []
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        model = (await client.models.list()).data[0].id
        for _ in range(args.passes + 1):
            began, seats = time.monotonic(), asyncio.Semaphore(args.streams)

            async def seated(prompt: list[int], seats: asyncio.Semaphore = seats) -> float:
                async with seats:
                    return await one(client, model, prompt, args.output_len)

            firsts = await asyncio.gather(*map(seated, prompts))
            total = sum(len(prompt) + args.output_len for prompt in prompts)
            found.append(Pass(total / (time.monotonic() - began), statistics.mean(firsts)))
    return found[1:]


def repeated(start: Start, args: argparse.Namespace) -> list[Pass]:
    rng = random.Random(1)
    count = round(args.times * args.cache_tokens / args.input_len)
    prompts = [[rng.randrange(300, VOCAB) for _ in range(args.input_len)] for _ in range(count)]
    with start() as server:
        return asyncio.run(passes(server.url, prompts, args))


def new_prompts(start: Start, args: argparse.Namespace) -> float:
    """Return the output tokens per second of a load in which no prompt comes again."""
    with start() as server:
        load = served(server.url, args.streams, args.input_len // 4, args.new_output_len, args.waves)
        return float(load["output_throughput"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("streams", 2), ("threads", 2), ("input-len", 1000), ("output-len", 16), ("new-output-len", 128), ("waves", 6),
        ("cache-tokens", 4096), ("times", 3), ("passes", 2), ("repeats", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    context = args.input_len + args.output_len + args.new_output_len

    def ours(*flags: str) -> Start:
        return lambda: runahead_process(
            packaged_gguf(), f"--threads={args.threads}", f"--max-model-len={context}",
            f"--num-gpu-blocks-override={args.cache_tokens // BLOCK}", *flags,
        )  # fmt: skip

    with tempfile.TemporaryDirectory(prefix="runahead-tiers-") as directory:
        kinds: dict[str, tuple[str, ...]] = {
            "off": (),
            "host": ("--kv-offload-bytes=4G",),
            "disk": (f"--kv-offload-dir={directory}/kv",),
        }
        new: dict[str, list[float]] = {kind: [] for kind in kinds}
        again: dict[str, list[Pass]] = {kind: [] for kind in kinds}
        for _ in range(args.repeats):
            for kind, flags in kinds.items():
                new[kind].append(new_prompts(ours(*flags), args))
                again[kind] += repeated(ours(*flags), args)
    if not llama_cpp.absent():
        per_slot = args.cache_tokens // args.streams
        for name, mebibytes in (("llama.cpp off", 0), ("llama.cpp host", 4096)):
            again[name] = repeated(
                lambda ram=mebibytes: llama_cpp.llama_cpp(  # type: ignore[misc]
                    packaged_gguf(), args.streams, per_slot, args.threads, cache_ram=ram
                ),
                args,
            )
    rows: list[dict[str, Any]] = [
        {
            "tiers": kind,
            "new prompts: tokens/s": round(statistics.median(new[kind]), 1) if kind in new else "",
            "again: tokens/s": round(statistics.median(p.tokens_per_second for p in found)),
            "again: TTFT, s": round(statistics.median(p.ttft for p in found), 3),
        }
        for kind, found in again.items()
    ]
    off = rows[0]
    figures = {
        f"{kind} against off": {
            "cost without hits, %": round(
                100 * (1 - row["new prompts: tokens/s"] / off["new prompts: tokens/s"]), 1
            ),
            "tokens/s again": round(row["again: tokens/s"] / off["again: tokens/s"], 2),
            "TTFT again": round(row["again: TTFT, s"] / off["again: TTFT, s"], 3),
        }
        for kind, row in zip(again, rows, strict=True)
        if kind in ("host", "disk")
    }
    title = (
        f"prompts of {args.input_len} tokens, {args.times} times the cache of {args.cache_tokens}: medians"
    )
    settings = {"llama.cpp": llama_cpp.absent() or llama_cpp.features(), **vars(args)}
    repeats = {"new": new, "again": {kind: [p._asdict() for p in found] for kind, found in again.items()}}
    report("kv_tiers", title, rows, figures, settings, repeats)


if __name__ == "__main__":
    main()
