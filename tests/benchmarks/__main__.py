"""`make bench NAME=...`: runs one benchmark. Without a name it lists all of them."""

import argparse
import ast
import importlib
import sys
from pathlib import Path

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__main__")


def summary(name: str) -> str:
    """Return the first paragraph of a benchmark's description as one line."""
    text = (Path(__file__).parent / f"{name}.py").read_text()
    return " ".join((ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].split())


if __name__ == "__main__":
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in NAMES:
        print("make bench NAME=..., one of:", *(f"  {each:20} {summary(each)}" for each in NAMES), sep="\n")
        raise SystemExit(f"there is no benchmark {name}" if name else 0)
    benchmark = importlib.import_module(f"tests.benchmarks.{name}")
    benchmark.main(argparse.ArgumentParser(f"make bench NAME={name}", description=benchmark.__doc__))
