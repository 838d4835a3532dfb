"""One engine on Ray, through Serve's proxy and through the frontend's own port, and `runahead serve` without Ray.

All run on a host of their own, which is a network namespace (needs root and `make setup-ray`), one after the other, and
get the same load. Ray runs as after `ray start --head`, with its dashboard and its own intervals.
"""

import argparse
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from services.checkpoint import DEMO_MODEL
from tests.benchmarks.support.report import add_ints, medians, report
from tests.benchmarks.support.servers import end_on_sigterm, served
from tests.ray.cluster import BIN, OWN_PORT, PROXY_PORT
from tests.ray.hosts import Host, hosts, why_not

SERVE, OWN, PROXY = "runahead serve", "Ray, frontend's port", "Ray, Serve's proxy"
PARTS = {
    "default:Frontend": "frontend", "services.cli.child frontend": "frontend", "ProxyActor": "proxy",
    "services.cli.child scheduler": "scheduler", "services.cli.child worker": "worker",
}  # fmt: skip
"""Part of a command line -> part of the server. All others are Ray (or the supervisor of `serve`)."""
OTHERS = "Ray"
FIGURES = {
    "tokens/s": "output_throughput", "ITL p50, ms": "median_itl_ms", "ITL p99, ms": "p99_itl_ms",
    "TTFT p50, ms": "median_ttft_ms",
}  # fmt: skip
PER_TOKEN = ", us/token"
START_SECONDS = 180.0
Row = dict[str, Any]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RUNAHEAD_"))}
    return kept | {"TMPDIR": "/tmp", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(Path.cwd())}


def processor_seconds(host: Host) -> dict[str, float]:
    """Return the processor time so far, by part."""
    found = dict.fromkeys([*PARTS.values(), OTHERS], 0.0)
    for process in host.processes():
        try:
            line, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.Error:
            continue
        part = next((part for text, part in PARTS.items() if text in line), OTHERS)
        found[part] += times.user + times.system
    return found


def used(host: Host, before: dict[str, float]) -> dict[str, float]:
    return {part: seconds - before[part] for part, seconds in processor_seconds(host).items()}


def load(host: Host, port: int, args: argparse.Namespace) -> Row:
    """Return the figures of a load, and the processor time of each part per token, in microseconds."""
    url = f"http://{host.address}:{port}"
    served(url, args.concurrency, args.input_len, args.output_len, 1)  # warm-up
    before = processor_seconds(host)
    result = served(url, args.concurrency, args.input_len, args.output_len, args.waves)
    spent, tokens = used(host, before), result["total_output_tokens"]
    costs = {f"{part}{PER_TOKEN}": 1e6 * seconds / tokens for part, seconds in spent.items()}
    return {label: result[key] for label, key in FIGURES.items()} | costs


@contextmanager
def running(host: Host, *words: str) -> Iterator[float]:
    """Run a command that serves at the frontends' own port. Yield the seconds until the first token of an answer."""
    began, file = time.monotonic(), host.tmp / "output"
    with (
        file.open("w") as output,
        subprocess.Popen(host.command(words), env=environment(), stdout=output, stderr=output) as process,
    ):
        try:
            while not answers(host):
                if process.poll() is not None or time.monotonic() > began + START_SECONDS:
                    raise SystemExit(f"{' '.join(words)}: no answer\n{file.read_text()[-2000:]}")
                time.sleep(0.05)
            yield time.monotonic() - began
        finally:
            host.kill()


def answers(host: Host) -> bool:
    url, body = f"http://{host.address}:{OWN_PORT}/v1/completions", b'{"prompt": "The", "max_tokens": 1}'
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": "application/json"})):
            return True
    except (urllib.error.URLError, OSError):
        return False


def repeat(host: Host, args: argparse.Namespace) -> dict[str, Row]:
    model = str(args.model)
    options = {"kv_cache_memory_bytes": "256M", "host": "0.0.0.0", "threads": "1"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    rows: dict[str, Row] = {}
    with running(
        host, str(BIN / "runahead"), "serve", model, f"--port={OWN_PORT}", "--log-level=warning", *flags
    ) as start:
        rows[SERVE] = load(host, OWN_PORT, args) | {"start, s": start}
    host.boot()
    head = ["--head", "--node-ip-address", host.address, "--num-cpus", "4"]
    host.run([str(BIN / "ray"), "start", *head], environment())
    host.run([str(BIN / "serve"), "start", "--http-host", "0.0.0.0"], environment())
    settings = [f"model={model}", *(f"{name}={value}" for name, value in options.items())]
    with running(host, str(BIN / "serve"), "run", "services.ray:app", *settings) as start:
        for way, port in ((OWN, OWN_PORT), (PROXY, PROXY_PORT)):
            rows[way] = load(host, port, args) | {"start, s": start}
        before, began = processor_seconds(host), time.monotonic()
        time.sleep(args.idle_seconds)
        idle = {part: spent / (time.monotonic() - began) for part, spent in used(host, before).items()}
        rows["idle, share of a core"] = idle
    host.boot()
    return rows


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    add_ints(parser, concurrency=16, input_len=64, output_len=200, waves=8, repeats=3)
    parser.add_argument("--idle-seconds", type=float, default=30)
    args = parser.parse_args()
    end_on_sigterm()
    if not (BIN / "ray").exists():
        raise SystemExit("Ray is not installed; install it with: make setup-ray")
    if reason := why_not():
        raise SystemExit(f"hosts of the benchmark: {reason}")
    with tempfile.TemporaryDirectory() as directory, hosts(1, Path(directory)) as (host,):
        repeats = [repeat(host, args) for _ in range(args.repeats)]
    median = {way: medians([rows[way] for rows in repeats]) for way in repeats[0]}
    idle = median.pop("idle, share of a core")
    report(
        "ray_served",
        title=f"{args.concurrency} streams of {args.output_len} tokens, one engine of one rank",
        rows=[
            {"way": way, **{label: value for label, value in row.items() if PER_TOKEN not in label}}
            for way, row in median.items()
        ],
        figures={
            "over_serve": {
                way: {label: median[way][label] / median[SERVE][label] for label in (*FIGURES, "start, s")}
                for way in (OWN, PROXY)
            },
            "start_s": {way: median[way]["start, s"] for way in (SERVE, OWN)},
            "us_per_token": {
                way: {label.removesuffix(PER_TOKEN): value for label, value in row.items() if PER_TOKEN in label}
                for way, row in median.items()
            },
            "idle": idle,
        },
        settings={key: str(value) for key, value in vars(args).items()},
        repeats=repeats,
    )
