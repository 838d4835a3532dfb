"""Start-up: seconds and CPU time from `runahead serve` to the line that names its URL, on a prepared environment."""

import argparse
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.benchmarks.support.random_llama import SHAPES, random_llama
from tests.benchmarks.support.report import report

SERVICE = re.compile(rb"services\.cli\.child\0(\w+)")
TICKS = 100
"""Clock ticks per second in /proc."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="m135", help=f"a path, or a random model: {', '.join(SHAPES)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("flags", nargs="*", help="of `runahead serve`")
    args = parser.parse_args()
    model = str(random_llama(args.model)) if args.model in SHAPES else args.model
    _start(model, args.flags)  # compiles what is not compiled, and reads the files into memory
    repeats = [_start(model, args.flags) for _ in range(args.repeats)]
    rows = [
        {"": name, **{part: f(run[part] for run in repeats) for part in repeats[0]}}
        for name, f in (("median", statistics.median), ("least", min), ("most", max))
    ]
    report(
        "start_up",
        title=f"{args.model}: seconds until it serves; CPU seconds of each process until then",
        rows=rows,
        figures={"seconds": statistics.median(run["ready s"] for run in repeats)},
        settings=vars(args),
        repeats=repeats,
    )


def _start(model: str, flags: list[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "services.cli", "serve", model, "--port=0", "--log-level=warning", *flags]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else b""
            ready = time.monotonic() - began
            if b"Serving" not in line:
                raise SystemExit("the server did not start")
            return {"ready s": ready, "serve": _cpu_seconds(process.pid), **_children(process.pid)}
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _children(parent: int) -> dict[str, float]:
    pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    found = {pid: SERVICE.search(Path(f"/proc/{pid}/cmdline").read_bytes()) for pid in pids}
    return {match[1].decode(): _cpu_seconds(int(pid)) for pid, match in found.items() if match is not None}


def _cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / TICKS


if __name__ == "__main__":
    main()
