"""What serving costs: tokens/s through HTTP over what the same kernels reach on a static batch without an engine.

Beside it, from the same run: bare torch (decode only), and vLLM on the same load where RUNAHEAD_BENCH_VLLM names the
python of an environment that has it (at its default and, as it keeps a core for itself, with as many compute threads).
"""

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.cli.bench.load import run_load
from services.cli.bench.metrics import figures
from services.config import BenchConfig
from tests.benchmarks.support.random_llama import SHAPES, random_llama
from tests.benchmarks.support.report import report

SUPPORT = Path(__file__).parent / "support"
PATIENCE = 180.0
"""Seconds for a server to start."""


@contextmanager
def runahead(model: Path, args: argparse.Namespace) -> Iterator[str]:
    """The URL of `runahead serve`."""
    command = [
        sys.executable, "-m", "services.cli", "serve", str(model), "--port=0", f"--threads={args.threads}",
        f"--dtype={args.dtype}", "--log-level=warning",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            match = re.search(r"(http://\S+)/v1", line)
            if match is None:
                raise SystemExit(f"the server did not start: {line}")
            yield match[1]
        finally:
            process.terminate()


@contextmanager
def vllm(python: str, model: Path, args: argparse.Namespace, threads: int | None) -> Iterator[str]:
    """The URL of `vllm serve`; `threads`: compute threads, None leaves them to vLLM."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **({"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"} if threads else {}),
    }
    command = [
        python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), f"--port={port}", f"--dtype={args.dtype}",
        "--max-model-len=1024", "--served-model-name=model",
    ]  # fmt: skip
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            _wait_for(f"http://127.0.0.1:{port}/health", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"no answer from {url}")


def served(url: str, args: argparse.Namespace) -> dict[str, object]:
    """The figures of one closed-loop load."""
    config = BenchConfig(
        base_url=url,
        num_prompts=args.concurrency * args.waves,
        num_warmups=2,
        max_concurrency=args.concurrency,
        random_input_len=args.input_len,
        random_output_len=args.output_len,
        ignore_eos=True,
    )
    load = run_load(config)
    result = figures(config, load)
    if result["failed"]:
        raise SystemExit(
            f"{result['failed']} requests failed: {next(r.error for r in load.requests if r.error)}"
        )
    return result


def without_engine(script: str, model: Path, args: argparse.Namespace) -> dict[str, float]:
    """The figures of a static batch, computed by a script beside this in a process of its own."""
    command = [
        sys.executable, str(SUPPORT / script), f"--model={model}", f"--threads={args.threads}", f"--dtype={args.dtype}",
        f"--batch={args.concurrency}", f"--prompt={args.input_len}", f"--output={args.output_len}",
        f"--waves={args.waves}",
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="m155", help=f"a directory, or a random model: {', '.join(SHAPES)}"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    for name, default in (
        ("threads", 2), ("concurrency", 16), ("input-len", 128), ("output-len", 128), ("waves", 4), ("repeats", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers are stopped on the way out
    model = random_llama(args.model) if args.model in SHAPES else Path(args.model)
    peer = os.environ.get("RUNAHEAD_BENCH_VLLM")
    repeats: dict[str, list[dict[str, object]]] = {"runahead": [], "static batch": [], "bare torch": []}
    for _ in range(args.repeats):  # side by side, so that a noisy minute meets all
        with runahead(model, args) as url:
            repeats["runahead"].append(served(url, args))
        repeats["static batch"].append(dict(without_engine("static_batch.py", model, args)))
        repeats["bare torch"].append(dict(without_engine("bare_torch.py", model, args)))
        for name, threads in (("vllm", None), ("vllm with all threads", args.threads)) if peer else ():
            with vllm(str(peer), model, args, threads) as url:
                repeats.setdefault(name, []).append(served(url, args))
    rates = {
        name: statistics.median(
            float(str(run.get("output_throughput", run.get("tokens_per_s")))) for run in runs
        )
        for name, runs in repeats.items()
    }
    ours = rates["runahead"]
    report(
        "engine_efficiency",
        title=f"{args.model}, {args.dtype}, {args.threads} threads, concurrency {args.concurrency}: medians",
        rows=[
            {"what": name, "output tokens/s": rate, "runahead / this": ours / rate}
            for name, rate in rates.items()
        ],
        figures={
            "ratio": ours / rates["static batch"],
            "over_bare_torch": ours / rates["bare torch"],
            **{
                f"over_{name.replace(', ', '_').replace(' ', '_')}": ours / rates[name]
                for name in rates
                if "vllm" in name
            },
            "output_throughput": rates,
        },
        settings=vars(args),
        repeats=repeats,
    )


if __name__ == "__main__":
    main()
