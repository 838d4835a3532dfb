"""`python3 -m tests.benchmarks.gpu [PART...]`: measurements on a GPU, in parts that each write a JSON file.

A part whose file exists is not run again, unless its tests failed, so the script goes on where it was stopped. Each
part is a process of its own, with a limit of time. See docs/gpu.md.
"""

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from tests.benchmarks.gpu.parts import IN_CI, PARTS
from tests.benchmarks.gpu.processes import run_within
from tests.benchmarks.gpu.target import gpu, tiny

DIRECTORY = Path("build/bench/gpu")
LIMIT = 450.0
"""Seconds that a part may take."""


def main(arguments: list[str] | None = None) -> int:
    """Run parts. Return 0 if all of them have succeeded, else 1."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.benchmarks.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all, the most valuable first")
    parser.add_argument("--out", type=Path, default=DIRECTORY, help=f"directory of the files; default: {DIRECTORY}")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds for all parts; those that do not fit wait"
    )
    parser.add_argument("--list", action="store_true", help="list the parts and the seconds of each")
    parser.add_argument("--tiny", action="store_true", help="on a simulated device, in this process")
    parser.add_argument("--here", action="store_true", help="run in this process, also if the file exists")
    chosen = parser.parse_args(arguments)
    parts = chosen.parts or ([*IN_CI] if chosen.tiny else [*PARTS])
    if chosen.list:
        for part in parts:
            print(f"{part:12} {PARTS[part].seconds:4.0f} s")
        return 0
    chosen.out.mkdir(parents=True, exist_ok=True)
    if chosen.tiny or chosen.here:
        passed = [_measure(part, chosen) for part in parts]
        return 0 if all(passed) else 1
    until = time.monotonic() + chosen.budget
    missing = [part for part in parts if not _run(part, chosen.out, until)]
    if missing:
        print(f"failed or left out: {', '.join(missing)}")
    return 1 if missing else 0


def _measure(part: str, chosen: argparse.Namespace) -> bool:
    """Measure a part in this process. Return False if its tests have failed."""
    file = chosen.out / f"{part}.json"
    began = time.monotonic()
    target = tiny() if chosen.tiny else gpu()
    result = PARTS[part].measure(target)
    content = {"part": part, "device": target.name, "seconds": time.monotonic() - began, **result}
    written = file.with_name(f"{file.name}.new")
    written.write_text(json.dumps(content, indent=1) + "\n")
    written.replace(file)  # complete whenever it exists
    print(f"{part}: {file}", flush=True)
    return bool(content.get("passed", True))


def _run(part: str, out: Path, until: float) -> bool:
    """Run a part in a process of its own, unless its file exists or its estimate is beyond `until`."""
    file, log = out / f"{part}.json", out / f"{part}.log"
    if file.is_file() and json.loads(file.read_text()).get("passed", True):
        print(f"{part}: {file} exists", flush=True)
        return True
    left = until - time.monotonic()
    if left < PARTS[part].seconds:
        print(f"{part}: left out; it takes about {PARTS[part].seconds:.0f} s, and {left:.0f} s are left")
        return False
    limit = min(LIMIT, left)
    command = [sys.executable, "-u", "-m", "tests.benchmarks.gpu", part, "--out", str(out), "--here"]
    status = run_within(command, limit, log)
    if status == 0:
        print(f"{part}: {file}\n{figures(file)}", flush=True)
    else:
        why = f"was not done in {limit:.0f} s" if status is None else "failed"
        print(f"{log.read_text(errors='replace')[-4000:]}\n{part} {why}; its output is in {log}", flush=True)
    return status == 0


def figures(file: Path) -> str:
    """Return the figures of a part as one line, without the output of tests: a machine may be gone before its files."""
    content = json.loads(file.read_text())
    content.pop("output", None)
    return json.dumps(content)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the part in progress is killed then
    sys.exit(main())
