"""`make bench-all`: the short form of every benchmark, one after the other, within a time for all.

The figures go to the file of this machine's class in docs/figures, and docs/benchmarks.md is made from these files. A
benchmark that fails or exceeds its limit is named at the end, and the others run. `--reports DIRECTORY --only SECTION`
runs nothing and takes reports that are there, also longer ones; `--page` only makes the page.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.benchmarks.gpu.processes import run_within
from tests.benchmarks.support import report
from tests.benchmarks.trend.classes import DIRECTORY, merge
from tests.benchmarks.trend.forms import FORMS, ShortForm
from tests.benchmarks.trend.page import PAGE, page

RUN = (sys.executable, "-m", "tests.benchmarks")
"""Command that runs the benchmark whose name follows."""
LOGS = report.DIRECTORY / "logs"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1, if a benchmark has no figures, else 0."""
    parser = argparse.ArgumentParser(prog="make bench-all", description=__doc__)
    names = [form.section for form in FORMS]
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="SECTION", help=", ".join(names))
    parser.add_argument("--minutes", type=float, default=30.0, help="for all; what does not fit is left out")
    parser.add_argument("--note", default="", help="what the page says about this run, such as: other work beside it")
    parser.add_argument("--reports", type=Path, help="directory of reports to take instead of running anything")
    parser.add_argument("--page", action="store_true", help="only make the page")
    chosen = parser.parse_args(arguments)
    forms = [] if chosen.page else [form for form in FORMS if form.section in chosen.only]
    if chosen.reports:
        if chosen.only == names:
            parser.error("--reports needs --only: a report does not say of which section it is")
        files = ((form, chosen.reports / f"{form.report or form.benchmark}.json") for form in forms)
        missing = [reason for form, file in files if (reason := taken(form, file, chosen.note))]
    else:
        missing = list(run_all(forms, time.monotonic() + 60 * chosen.minutes, chosen.note))
    PAGE.write_text(page())
    for reason in missing:
        print(reason)
    return 1 if missing else 0


def run_all(
    forms: Sequence[ShortForm], until: float, note: str = "", run: Sequence[str] = RUN, figures: Path = DIRECTORY
) -> Iterator[str]:
    """Run and merge. Yield why a benchmark has no figures, unless this processor cannot run it."""
    LOGS.mkdir(parents=True, exist_ok=True)
    for form in forms:
        seconds = min(form.seconds, until - time.monotonic())
        if seconds <= 0:
            yield f"{form.section}: no time left"
            continue
        file, log = report.DIRECTORY / f"{form.report or form.benchmark}.json", LOGS / f"{form.section}.log"
        file.unlink(missing_ok=True)
        log.unlink(missing_ok=True)
        command = [*run, form.benchmark, *shlex.split(form.arguments)]
        began = time.monotonic()
        code = run_within(command, seconds, log)
        print(f"{form.section}: {time.monotonic() - began:.0f} s", flush=True)
        if code == report.SKIPPED:
            continue
        if code != 0:
            yield f"{form.section}: {'exceeded its limit' if code is None else f'exit status {code}'}; see {log}"
        elif reason := taken(form, file, note, figures):
            yield reason


def taken(form: ShortForm, file: Path, note: str, figures: Path = DIRECTORY) -> str:
    """Merge a report. Return why it cannot be merged; empty: it is."""
    try:
        merge(form.section, json.loads(file.read_text()), note, figures)
    except (OSError, LookupError, ValueError) as error:
        return f"{form.section}: {error}"
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
