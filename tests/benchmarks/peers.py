"""Runahead beside its peers: `vllm serve` and llama.cpp's server, all with the same model, in one run.

The model is a GGUF file. llama.cpp and the native backend read it; vLLM has no loader for it, so `vllm serve` and the
vllm backend read what `runahead convert` writes, in bfloat16. One client measures all servers: a closed loop of streams
over HTTP with `ignore_eos`. Each server in turn has the machine to itself, and each repeat runs all servers. No server
has the prompts in its cache.
"""

import argparse
import json
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

from tests.benchmarks.support import llama_cpp
from tests.benchmarks.support.peers_chart import draw
from tests.benchmarks.support.report import DIRECTORY, report
from tests.benchmarks.support.servers import (
    VLLM_ENVIRONMENT,
    ServerProcess,
    runahead_process,
    served,
    vllm_process,
    vllm_python,
)

GIB = 1 << 30
BLOCK = 128
"""Tokens per block of vLLM's kernels on the CPU."""
ONES = 4
"""Requests of a load of one stream; others have `--waves` for each stream."""
KEPT = DIRECTORY / "peers.repeats.json"
Runs = Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]
"""Metrics of each repeat, by server and number of streams."""


@dataclass(frozen=True)
class PeerSetting:
    args: argparse.Namespace
    gguf: Path
    converted: Path | None
    """The same model as a Hugging Face checkpoint."""

    @property
    def context(self) -> int:
        """Tokens of a request, with room for a warm-up's rounding."""
        return int(self.args.input_len + self.args.output_len + 64)

    def checkpoint(self) -> Path:
        assert self.converted is not None, "servers that need it are absent otherwise"
        return self.converted


Serve = Callable[[PeerSetting, int], AbstractContextManager[ServerProcess]]
"""Start a server for at most so many streams."""


@dataclass(frozen=True)
class ComparedServer:
    owner: str
    """"runahead", "vllm" or "llama_cpp"."""
    weights: str
    serve: Serve
    needs_vllm: bool = False
    has_slots: bool = False
    """It starts with the number of streams, so each load has a server of its own."""

    def loads(self, streams: list[int]) -> list[list[int]]:
        """Return the numbers of streams that one process after the other gets."""
        return [[number] for number in streams] if self.has_slots else [streams]


def _native(*flags: str) -> Serve:
    def serve(setting: PeerSetting, streams: int) -> AbstractContextManager[ServerProcess]:
        return runahead_process(setting.gguf, *_common(setting), "--backend=native", *flags)

    return serve


def _vllm_backend(setting: PeerSetting, streams: int) -> AbstractContextManager[ServerProcess]:
    flags = *_common(setting), "--backend=vllm", "--dtype=bfloat16", f"--block-size={BLOCK}"
    return runahead_process(setting.checkpoint(), *flags, python=vllm_python())


def _common(setting: PeerSetting) -> tuple[str, ...]:
    return (
        f"--threads={setting.args.threads}",
        f"--max-model-len={setting.args.max_model_len}",
        f"--kv-cache-memory-bytes={setting.args.kv_gib * GIB}",
        "--no-enable-prefix-caching",
    )


def _vllm(*flags: str, threads: int | None = None) -> Serve:
    def serve(setting: PeerSetting, streams: int) -> AbstractContextManager[ServerProcess]:
        arguments = (
            "--dtype=bfloat16", f"--max-model-len={setting.args.max_model_len}", f"--block-size={BLOCK}",
            f"--kv-cache-memory-bytes={setting.args.kv_gib * GIB}", "--no-enable-prefix-caching", *flags,
        )  # fmt: skip
        return vllm_process(setting.checkpoint(), *arguments, threads=threads)

    return serve


def _llama_cpp(setting: PeerSetting, streams: int) -> AbstractContextManager[ServerProcess]:
    return llama_cpp.llama_cpp(setting.gguf, streams, setting.context, setting.args.threads)


CORES = len(os.sched_getaffinity(0))
SERVERS: Mapping[str, ComparedServer] = {
    "llama.cpp": ComparedServer("llama_cpp", "blocks of the file", _llama_cpp, has_slots=True),
    "vllm serve": ComparedServer("vllm", "bfloat16", _vllm(), needs_vllm=True),
    "vllm serve, all cores": ComparedServer("vllm", "bfloat16", _vllm(threads=CORES), needs_vllm=True),
    "vllm serve, not compiled": ComparedServer("vllm", "bfloat16", _vllm("--enforce-eager"), needs_vllm=True),
    "runahead native": ComparedServer("runahead", "blocks of the file", _native()),
    "runahead native, batch-invariant": ComparedServer(
        "runahead", "blocks of the file", _native("--batch-invariant")
    ),
    "runahead native, bfloat16": ComparedServer("runahead", "bfloat16", _native("--quantization=none")),
    "runahead vllm": ComparedServer("runahead", "bfloat16", _vllm_backend, needs_vllm=True),
}


def main() -> None:
    args = _arguments()
    gguf = Path(args.model) if args.model else packaged_gguf()
    absent = {name: reason for name in args.servers if (reason := _absent(SERVERS[name]))}
    names = [name for name in args.servers if name not in absent]
    converted = _converted(gguf) if any(SERVERS[name].needs_vllm for name in names) else None
    setting = PeerSetting(args, gguf, converted)
    repeats = _kept() if args.keep else defaultdict(list)
    for _ in range(args.repeats):
        for name in names:
            for numbers in SERVERS[name].loads(args.streams):
                with SERVERS[name].serve(setting, max(numbers)) as server:
                    for streams in numbers:
                        repeats[name, streams].append(_measured(server, args, streams))
                        _keep(repeats)
    chart = Path(args.chart) if args.chart else DIRECTORY / "peers.png"
    print(draw(repeats, f"{gguf.stem}, {args.input_len} tokens in, {args.output_len} out", chart))
    report(
        "peers",
        title=f"{gguf.stem}, {args.input_len} tokens in, {args.output_len} out: medians",
        rows=_rows(repeats),
        figures={**ratios(repeats), "absent": absent or "none"},
        settings={
            **vars(args),
            "gguf": gguf.name,
            "weights": {name: SERVERS[name].weights for name, _ in repeats},
            "llama.cpp": "absent" if llama_cpp.absent() else llama_cpp.features(),
        },
        repeats={f"{name} at {streams}": runs for (name, streams), runs in repeats.items()},
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="", help="a GGUF file; by default the packaged SmolLM2-135M-Instruct"
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--servers", nargs="+", default=list(SERVERS), choices=SERVERS, metavar="NAME")
    parser.add_argument("--keep", action="store_true", help=f"add to the repeats in {KEPT}")
    parser.add_argument("--chart", default="", help="file to write; default: build/bench/peers.png")
    for name, default in (
        ("threads", CORES), ("input-len", 128), ("output-len", 128), ("waves", 2), ("repeats", 3),
        ("max-model-len", 1024), ("kv-gib", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def packaged_gguf() -> Path:
    """Raises: SystemExit, if the package is not installed."""
    from services.checkpoint.default_model import packaged_model

    path = packaged_model()
    if path is None:
        raise SystemExit("the default model is not installed; run `make`, or name a GGUF file with --model")
    return path


def _converted(gguf: Path) -> Path:
    """Return the directory with the model in Hugging Face format. Raises: CalledProcessError"""
    command = [sys.executable, "-m", "services.cli", "convert", str(gguf)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(answer.stdout.splitlines()[-1])


def _absent(server: ComparedServer) -> str:
    """Return why a server cannot be measured here; empty: it can."""
    if server.owner == "llama_cpp":
        return llama_cpp.absent()
    if server.needs_vllm and not (VLLM_ENVIRONMENT / "bin" / "python").exists():
        return "vLLM is not installed; install it with: make setup-vllm"
    return ""


def _keep(repeats: Runs) -> None:
    """Write the repeats, so that a run can be continued."""
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    KEPT.write_text(json.dumps([[*key, runs] for key, runs in repeats.items()]))


def _kept() -> defaultdict[tuple[str, int], list[Any]]:
    """Return the repeats of an earlier run, which may have been interrupted."""
    runs = json.loads(KEPT.read_text()) if KEPT.is_file() else []
    return defaultdict(list, {(name, streams): found for name, streams, found in runs})


def _measured(server: ServerProcess, args: argparse.Namespace, streams: int) -> dict[str, Any]:
    waves = max(args.waves, -(-ONES // streams))
    metrics = served(server.url, streams, args.input_len, args.output_len, waves)
    return {**metrics, "resident_bytes": server.resident_bytes()}


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


def ratios(repeats: Runs) -> dict[str, object]:
    """Return tokens/s of the better backend over the best setting of each peer, by number of streams."""
    best: dict[str, dict[int, float]] = defaultdict(dict)
    for (name, streams), runs in repeats.items():
        of_owner, speed = best[SERVERS[name].owner], _median(runs, "output_throughput")
        of_owner[streams] = max(speed, of_owner.get(streams, 0.0))
    return {
        f"over_{peer}": {
            str(streams): best["runahead"][streams] / speed
            for streams, speed in sorted(best[peer].items())
            if streams in best["runahead"]
        }
        for peer in ("vllm", "llama_cpp")
    }


if __name__ == "__main__":
    main()
