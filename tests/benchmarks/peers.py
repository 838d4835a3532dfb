"""Runahead beside its peers: `vllm serve` and llama.cpp's server, all with the same models, in one run.

Models are GGUF files, or random ones of `random_gguf`, such as llama-1b.Q4_K_M. llama.cpp and the native backend read
them; vLLM has no loader for them, so `vllm serve` and the vllm backend read what `runahead convert` writes, in
bfloat16. Models may be checkpoints too, or random ones of `random_llama`, such as m4, which llama.cpp does not read.
One client measures all servers: a closed loop of streams over HTTP with `ignore_eos`. Each server in turn has the
machine to itself, and each repeat runs all servers. No server has the prompts in its cache. By default vLLM leaves one
core to its engine, which spins there, and Runahead computes on all cores.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.worker.kernels.selection import TILES, processor_features
from tests.benchmarks.support import llama_cpp
from tests.benchmarks.support.random_gguf import KINDS, SHAPES, random_gguf
from tests.benchmarks.support.random_llama import SHAPES as LLAMAS
from tests.benchmarks.support.random_llama import named_model
from tests.benchmarks.support.report import add_ints, report
from tests.benchmarks.support.servers import (
    VLLM_ENVIRONMENT,
    ServerProcess,
    runahead_process,
    served,
    vllm_process,
    vllm_python,
)

GIB = 1 << 30
VLLM_FLAGS = "--dtype=bfloat16", "--block-size=128"
"""Also of our vllm backend. Blocks are those of vLLM's kernels on the CPU."""
ONES = 4
"""Requests of a load of one stream; others have `--waves` for each stream."""
Repeats = dict[str, dict[tuple[str, int], list[Any]]]
"""Metrics of each repeat, by file, and by server and number of streams."""
Runs = Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]
"""The same of one file."""


@dataclass(frozen=True)
class PeerSetting:
    args: argparse.Namespace
    file: Path
    """GGUF file or checkpoint."""
    converted: Path | None
    """The same model as a Hugging Face checkpoint."""

    @property
    def context(self) -> int:
        """Tokens of a request, with room for a warm-up's rounding."""
        return int(self.args.input_len + self.args.output_len + 64)

    def checkpoint(self) -> Path:
        assert self.converted is not None, "servers that need it are absent otherwise"
        return self.converted


@dataclass(frozen=True)
class ComparedServer:
    owner: str
    """"runahead", "vllm" or "llama_cpp"."""
    weights: str
    backend: str = ""
    """Backend of our server; "": another server."""
    flags: tuple[str, ...] = ()
    threads: int | None = None
    """Compute threads of vLLM; None: its default."""

    @property
    def needs_vllm(self) -> bool:
        return "vllm" in (self.owner, self.backend)

    def loads(self, streams: list[int]) -> list[list[int]]:
        """Return the numbers of streams that one process after the other gets. llama.cpp's server starts with the
        number of streams, so each load has one of its own."""
        return [[number] for number in streams] if self.owner == "llama_cpp" else [streams]

    def serve(self, setting: PeerSetting, streams: int) -> AbstractContextManager[ServerProcess]:
        """Start the server for at most so many streams."""
        args = setting.args
        common = (
            f"--max-model-len={args.max_model_len}",
            f"--kv-cache-memory-bytes={args.kv_gib * GIB}",
            "--no-enable-prefix-caching",
        )
        if self.owner == "llama_cpp":
            return llama_cpp.llama_cpp(setting.file, streams, setting.context, args.threads or CORES)
        if self.owner == "vllm":
            return vllm_process(setting.checkpoint(), *common, *VLLM_FLAGS, *self.flags, threads=self.threads)
        own = f"--backend={self.backend}", f"--threads={args.threads}", *common, *self.flags
        if self.backend == "native":
            return runahead_process(setting.file, *own)
        return runahead_process(setting.checkpoint(), *own, *VLLM_FLAGS, python=vllm_python())


CORES = len(os.sched_getaffinity(0))
SERVERS: dict[str, ComparedServer] = {
    "llama.cpp": ComparedServer("llama_cpp", "blocks of the file"),
    "vllm serve": ComparedServer("vllm", "bfloat16"),
    "vllm serve, all cores": ComparedServer("vllm", "bfloat16", threads=CORES),
    "vllm serve, not compiled": ComparedServer("vllm", "bfloat16", flags=("--enforce-eager",)),
    "runahead native": ComparedServer("runahead", "as stored", "native"),
    "runahead native, throughput": ComparedServer(
        "runahead", "as stored", "native", ("--performance-mode=throughput",)
    ),
    "runahead native, bfloat16": ComparedServer("runahead", "bfloat16", "native", ("--quantization=none",)),
    "runahead vllm": ComparedServer("runahead", "bfloat16", "vllm"),
}


def main(parser: argparse.ArgumentParser) -> None:
    args = _arguments(parser)
    files = [_model(name) for name in args.model] or [packaged_gguf()]
    absent = {name: reason for name in args.servers if (reason := _absent(SERVERS[name], files))}
    names = [name for name in args.servers if name not in absent]
    repeats: Repeats = {}
    for _ in range(args.repeats):
        for file in files:
            _run(PeerSetting(args, file, _converted(file, names)), names, repeats)
    report(
        "peers",
        title=f"{args.input_len} tokens in, {args.output_len} out: medians",
        rows=[{"model": model, **row} for model, runs in repeats.items() for row in _rows(runs)],
        figures={**_figures(repeats), "absent": absent or "none"},
        settings={
            **vars(args),
            "weights": {name: SERVERS[name].weights for name in names},
            "llama.cpp": "absent" if llama_cpp.absent() else llama_cpp.features(),
        },
        repeats={
            f"{model}: {name} at {streams}": each
            for model, runs in repeats.items()
            for (name, streams), each in runs.items()
        },
    )


def _run(setting: PeerSetting, names: list[str], repeats: Repeats) -> None:
    runs = repeats.setdefault(setting.file.name.removesuffix(".gguf"), {})
    for name in names:
        for numbers in SERVERS[name].loads(setting.args.streams):
            with SERVERS[name].serve(setting, max(numbers)) as server:
                for streams in numbers:
                    runs.setdefault((name, streams), []).append(_measured(server, setting.args, streams))


def _arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument(
        "--model",
        nargs="*",
        default=[],
        metavar="FILE",
        help=f"GGUF files or checkpoints, or one of {', '.join(SHAPES)} with .{', .'.join(KINDS)}, or one of "
        f"{', '.join(LLAMAS)}; default: the packaged SmolLM2",
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--servers", nargs="+", default=[*SERVERS], choices=SERVERS, metavar="NAME")
    add_ints(parser, threads=0, input_len=128, output_len=128, waves=2, repeats=3, max_model_len=1024, kv_gib=1)
    return parser.parse_args()


def _model(name: str) -> Path:
    shape, _, kind = name.partition(".")
    return random_gguf(shape, kind) if shape in SHAPES and kind in KINDS else named_model(name)


def packaged_gguf() -> Path:
    """Raises: SystemExit, if the package is not installed."""
    from services.checkpoint.default_model import packaged_model

    path = packaged_model()
    if path is None:
        raise SystemExit("the default model is not installed; run `make`, or name a GGUF file with --model")
    return path


def _converted(file: Path, names: list[str]) -> Path | None:
    """Return the directory with the model in Hugging Face format, if a server needs it. Raises: CalledProcessError"""
    if file.is_dir() or not any(SERVERS[name].needs_vllm for name in names):
        return file if file.is_dir() else None
    command = [sys.executable, "-m", "services.cli", "convert", str(file)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(answer.stdout.splitlines()[-1])


def _absent(server: ComparedServer, files: Sequence[Path]) -> str:
    """Return why a server cannot be measured here; empty: it can."""
    if server.owner == "llama_cpp":
        return "llama.cpp reads no checkpoints" if any(file.is_dir() for file in files) else llama_cpp.absent()
    if server.needs_vllm and not (VLLM_ENVIRONMENT / "bin" / "python").exists():
        return "vLLM is not installed; install it with: make setup-vllm"
    if any("throughput" in flag for flag in server.flags) and TILES not in processor_features():
        return "without AMX it is the same as runahead native"
    return ""


def _measured(server: ServerProcess, args: argparse.Namespace, streams: int) -> dict[str, Any]:
    """Return the metrics of a load, and the memory of the server's processes."""
    lengths, waves = (args.input_len, args.output_len), max(args.waves, -(-ONES // streams))
    served(server.url, 2, *lengths, waves=1, warmups=0, seed=1)
    load = served(server.url, streams, *lengths, waves, warmups=0)
    return {**load, "resident_bytes": server.resident_bytes()}


def _median(runs: Sequence[Mapping[str, Any]], figure: str) -> float:
    return statistics.median(float(run[figure]) for run in runs)


def _rows(repeats: Runs) -> list[dict[str, object]]:
    rows = []
    for (name, streams), runs in sorted(repeats.items(), key=lambda item: item[0][1]):
        speeds = [run["output_throughput"] for run in runs]
        rows.append({
            "streams": streams,
            "server": name,
            "weights": SERVERS[name].weights,
            "tokens/s": _median(runs, "output_throughput"),
            "least": min(speeds),
            "most": max(speeds),
            "TTFT ms": _median(runs, "median_ttft_ms"),
            "ITL p50 ms": _median(runs, "median_itl_ms"),
            "ITL p99 ms": _median(runs, "p99_itl_ms"),
            "resident MiB": _median(runs, "resident_bytes") / (1 << 20),
        })  # fmt: skip
    return rows


def _figures(repeats: Repeats) -> dict[str, dict[str, Any]]:
    """Return tokens/s of the better backend over the best setting of each peer, the first token's time and resident
    memory in the same way: figure -> model -> number of streams -> ratio. Then each of our servers over the fastest
    `vllm serve`."""
    figures: dict[str, dict[str, Any]] = {
        f"{prefix}over_{peer}": {
            model: found for model, runs in repeats.items() if (found := _ratios(runs, peer, figure, best))
        }
        for peer in ("vllm", "llama_cpp")
        for prefix, figure, best in (
            ("", "output_throughput", max),
            ("ttft_", "median_ttft_ms", min),
            ("resident_", "resident_bytes", min),
        )
    }
    return figures | {"each_over_vllm": {model: _each_over_vllm(runs) for model, runs in repeats.items()}}


def _each_over_vllm(runs: Runs) -> dict[str, dict[str, float]]:
    ratios = {}
    for name, streams in runs:
        at = {other: each for (other, number), each in runs.items() if number == streams}
        peers = [each for other, each in at.items() if SERVERS[other].owner == "vllm"]
        if SERVERS[name].owner == "runahead" and peers:
            best = max(peers, key=lambda each: _median(each, "output_throughput"))
            ratios[f"{name} at {streams}"] = {
                what: _median(at[name], figure) / _median(best, figure)
                for what, figure in (("tokens/s", "output_throughput"), ("p99 ITL", "p99_itl_ms"))
            }
    return ratios


def _ratios(runs: Runs, peer: str, figure: str, best: Callable[[list[float]], float]) -> dict[str, float]:
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for (name, streams), each in runs.items():
        found[SERVERS[name].owner, streams].append(_median(each, figure))
    numbers = sorted({streams for _, streams in runs})
    return {
        str(n): best(found["runahead", n]) / best(found[peer, n])
        for n in numbers
        if found["runahead", n] and found[peer, n]
    }
