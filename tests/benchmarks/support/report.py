"""Report of a benchmark: a table for people, and build/bench/NAME.json with all it takes to judge the figures."""

import argparse
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.table import Table

DIRECTORY = Path("build/bench")
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
MICROARCHITECTURES = {
    (6, 85): "Skylake or Cascade Lake",
    (6, 106): "Ice Lake",
    (6, 143): "Sapphire Rapids",
    (6, 207): "Emerald Rapids",
    (6, 173): "Granite Rapids",
    (23, 49): "Zen 2",
    (25, 1): "Zen 3",
    (25, 17): "Zen 4",
    (26, 2): "Zen 5",
}
"""Names by family and model, of processors of servers."""

SKIPPED = 77
"""Exit status of a benchmark that this processor cannot run."""


def skip(reason: str) -> NoReturn:
    """Raises: SystemExit"""
    print(reason, file=sys.stderr)
    raise SystemExit(SKIPPED)


def add_ints(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Add options of whole numbers with these defaults."""
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each figure of several runs."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def report(
    name: str,
    title: str,
    rows: Sequence[Mapping[str, object]],
    figures: Mapping[str, object],
    settings: Mapping[str, object],
    repeats: object,
) -> None:
    """Print `rows` and `figures`, and write them as JSON with the settings, the machine and every repeat."""
    print_table(title, rows)
    console = _console()
    for figure, value in figures.items():
        console.print(f"{figure}: {_text(value)}", highlight=False)
    measured_on = machine()
    console.print(
        f"machine: {measured_on['cpu']}, {measured_on['cores']} cores, {_text(measured_on['features'])}",
        highlight=False,
    )
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    file = DIRECTORY / f"{name}.json"
    content = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **figures,
        "rows": rows,
        "settings": {"arguments": sys.argv[1:], **settings},
        "machine": measured_on,
        "repeats": repeats,
    }
    file.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"results written to {file}", highlight=False)


def print_table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    _console().print(table)


def _console() -> Console:
    return Console(width=max(100, Console().width))


def machine() -> dict[str, object]:
    """Return properties of the machine. The load average shows whether other processes ran during the benchmark."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "features": processor_features(),
        "load_average": os.getloadavg(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: _version(package) for package in ("runahead-engine", "numpy", "torch", "pyzmq", "msgspec")},
    }


def processor_features() -> list[str]:
    """Return those instruction sets of the processor that matter for matrix products, by their names in Linux."""
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    return [name for name in FEATURES if name in flags.split()]


def _cpu_model() -> str:
    """Return the model's name without its clock; with the microarchitecture, of which virtual machines do not say."""
    lines = (line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    found = {key.strip(): value.strip() for key, value in lines}
    name = re.sub(r"\((R|TM)\)|Intel|Processor|CPU|@.*", "", found.get("model name", platform.processor()))
    core = MICROARCHITECTURES.get((int(found.get("cpu family", 0)), int(found.get("model", 0))))
    return " ".join(name.split()) + (f" ({core})" if core else "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _text(value: object) -> str:
    match value:
        case float():
            return f"{value:,.4g}" if abs(value) < 100 else f"{value:,.0f}"
        case dict():
            return ", ".join(f"{key}: {_text(item)}" for key, item in value.items())
        case list():
            return " ".join(_text(item) for item in value)
    return str(value)
