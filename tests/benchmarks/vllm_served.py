"""Comparison with vLLM: `runahead serve --backend vllm` against `vllm serve`, in one run.

Model, kernels and load (a closed loop of streams) are equal. Each server in turn has the machine to itself and gets all
loads `--loads` times; each repeat starts all servers. Every load of a server has prompts of its own, which no prefix
cache has. Servers have their default threads, or as many as their name says: by default vLLM
leaves one core to its engine, which spins there, and Runahead computes on all cores.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.benchmarks.support.processor_time import total_seconds
from tests.benchmarks.support.random_llama import SHAPES, random_llama
from tests.benchmarks.support.report import report
from tests.benchmarks.support.servers import ServerProcess, runahead_process, served, vllm_process, vllm_python

GIB = 1 << 30
BLOCK = 128
"""Tokens per block: vLLM's default on the CPU."""
SEEDS = 2
"""Seeds of a load: its prompts and those of its warm-up."""

Serve = Callable[[Path, argparse.Namespace], AbstractContextManager[ServerProcess]]


CORES = len(os.sched_getaffinity(0))


def _runahead_server(backend: str, threads: int = 0, *flags: str) -> Serve:
    def serve(model: Path, args: argparse.Namespace) -> AbstractContextManager[ServerProcess]:
        return runahead_process(
            model,
            f"--backend={backend}",
            f"--threads={threads}",
            f"--dtype={args.dtype}",
            f"--max-model-len={args.max_model_len}",
            f"--block-size={BLOCK}",
            f"--kv-cache-memory-bytes={args.kv_gib * GIB}",
            *flags,
            python=vllm_python(),
        )

    return serve


def _vllm_server(*flags: str, threads: int | None = None) -> Serve:
    def serve(model: Path, args: argparse.Namespace) -> AbstractContextManager[ServerProcess]:
        return vllm_process(
            model,
            f"--dtype={args.dtype}",
            f"--max-model-len={args.max_model_len}",
            f"--block-size={BLOCK}",
            f"--kv-cache-memory-bytes={args.kv_gib * GIB}",
            *flags,
            threads=threads,
        )

    return serve


SERVERS: Mapping[str, Serve] = {
    "vllm serve": _vllm_server(),
    "vllm serve, all cores": _vllm_server(threads=CORES),
    "vllm serve, not compiled": _vllm_server("--enforce-eager"),
    "runahead vllm": _runahead_server("vllm"),
    "runahead vllm, a core less": _runahead_server("vllm", max(1, CORES - 1)),
    "runahead native": _runahead_server("native"),
    "runahead native, a core less": _runahead_server("native", max(1, CORES - 1)),
}
"""Servers by name. The peers are those whose name begins with vllm."""
STAGES = {
    f"two stages, {policy}": _runahead_server("vllm", 0, "--pipeline-parallel-size=2", f"--batching-policy={policy}")
    for policy in ("balanced", "chunked")
}
"""Servers that run only if they are named; `balanced` is compared with `chunked`."""
ALL = {**SERVERS, **STAGES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="m4", help=f"a directory, or a random model: {', '.join(SHAPES)}")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--servers", nargs="+", default=list(SERVERS), choices=ALL, metavar="NAME")
    parser.add_argument("--loads", type=int, default=1, help="times that a server, once started, gets all loads")
    for name, default in (
        ("input-len", 64), ("output-len", 128), ("waves", 4),
        ("repeats", 3), ("max-model-len", 1024), ("kv-gib", 2),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    model = random_llama(args.model) if args.model in SHAPES else Path(args.model)
    repeats: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for _ in range(args.repeats):
        for name in args.servers:
            with ALL[name](model, args) as server:
                for number, concurrency in enumerate(args.loads * args.concurrency):
                    repeats.setdefault((name, concurrency), []).append(_measured(server, args, concurrency, number))
    report(
        "vllm_served",
        title=f"{args.model}, {args.dtype}, {args.input_len} tokens in, {args.output_len} out: medians",
        rows=_rows(repeats),
        figures=_ratios(repeats),
        settings=vars(args),
        repeats={f"{name} at {concurrency}": runs for (name, concurrency), runs in repeats.items()},
    )


def _measured(server: ServerProcess, args: argparse.Namespace, concurrency: int, number: int) -> dict[str, Any]:
    """Return the metrics of a server's load with this number, and how many cores its processes kept busy."""
    lengths = args.input_len, args.output_len
    served(server.url, 2, *lengths, waves=1, warmups=0, seed=SEEDS * number + 1)
    before = total_seconds(server)
    load = served(server.url, concurrency, *lengths, args.waves, warmups=0, seed=SEEDS * number)
    return {**load, "busy_cores": (total_seconds(server) - before) / load["duration"]}


def _median(runs: list[dict[str, Any]], figure: str) -> float:
    return statistics.median(float(run[figure]) for run in runs)


def _rows(repeats: Mapping[tuple[str, int], list[dict[str, Any]]]) -> list[dict[str, object]]:
    return [
        {
            "server": name,
            "concurrency": concurrency,
            "output tokens/s": _median(runs, "output_throughput"),
            "least": min(run["output_throughput"] for run in runs),
            "most": max(run["output_throughput"] for run in runs),
            "p99 ITL ms": _median(runs, "p99_itl_ms"),
            "median TTFT ms": _median(runs, "median_ttft_ms"),
            "busy cores": _median(runs, "busy_cores"),
        }
        for (name, concurrency), runs in sorted(repeats.items(), key=lambda item: item[0][1])
    ]


def _ratios(repeats: Mapping[tuple[str, int], list[dict[str, Any]]]) -> dict[str, object]:
    """Return the metrics of Runahead relative to the fastest peer at the same concurrency: tokens/s, p99 ITL."""
    ratios: dict[str, object] = {}
    for concurrency in sorted({concurrency for _, concurrency in repeats}):
        at = {name: runs for (name, number), runs in repeats.items() if number == concurrency}
        if at.keys() >= STAGES.keys():
            balanced, chunked = (_median(at[name], "output_throughput") for name in STAGES)
            ratios[f"balanced_over_chunked_at_{concurrency}"] = balanced / chunked
        peers = [name for name in at if name.startswith("vllm")]
        if not peers:
            continue
        best = max(peers, key=lambda name: _median(at[name], "output_throughput"))
        ratios[f"best_peer_at_{concurrency}"] = best
        for name in sorted(at.keys() - set(peers)):
            ratios[f"{name} at {concurrency}"] = {
                "tokens/s": _median(at[name], "output_throughput") / _median(at[best], "output_throughput"),
                "p99 ITL": _median(at[name], "p99_itl_ms") / _median(at[best], "p99_itl_ms"),
            }
    return ratios


if __name__ == "__main__":
    main()
