"""`python3 -m tests.benchmarks.gpu [PART...]`: measurements on a GPU, in parts that each write a JSON file.

A part whose file exists is not run again, unless its tests failed, so the script goes on where it was stopped. Each
part is a process of its own, with a limit of time. See docs/gpu.md.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from tests.benchmarks.gpu.parts import IN_CI, PARTS, SECONDS
from tests.benchmarks.gpu.target import gpu, tiny

DIRECTORY = Path("build/bench/gpu")


def main(arguments: list[str] | None = None) -> int:
    """Run parts. Return 0 if all that were run have succeeded, else 1."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.benchmarks.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument(
        "--out", type=Path, default=DIRECTORY, help=f"directory of the files; default: {DIRECTORY}"
    )
    parser.add_argument("--tiny", action="store_true", help="on a simulated device, in this process")
    parser.add_argument("--here", action="store_true", help="run in this process, also if the file exists")
    chosen = parser.parse_args(arguments)
    parts = chosen.parts or ([*IN_CI] if chosen.tiny else [*PARTS])
    chosen.out.mkdir(parents=True, exist_ok=True)
    failed = [part for part in parts if not _run(part, chosen)]
    for part in failed:
        print(f"{part}: failed")
    return 1 if failed else 0


def _run(part: str, chosen: argparse.Namespace) -> bool:
    file = chosen.out / f"{part}.json"
    if chosen.tiny or chosen.here:
        began = time.monotonic()
        target = tiny() if chosen.tiny else gpu()
        result = PARTS[part](target)
        content = {"part": part, "device": target.name, "seconds": time.monotonic() - began, **result}
        file.write_text(json.dumps(content, indent=1) + "\n")
        print(f"{part}: {file}", flush=True)
        return bool(content.get("passed", True))
    if file.is_file() and json.loads(file.read_text()).get("passed", True):
        print(f"{part}: {file} exists", flush=True)
        return True
    command = [sys.executable, "-m", "tests.benchmarks.gpu", part, "--out", str(chosen.out), "--here"]
    try:
        return subprocess.run(command, timeout=SECONDS, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"{part}: not done in {SECONDS} s", flush=True)
        return False


if __name__ == "__main__":
    sys.exit(main())
