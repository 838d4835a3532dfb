"""docs/benchmarks.md, from the figures of all classes of machines and docs/figures/benchmarks.template."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from tests.benchmarks.trend.classes import DIRECTORY
from tests.benchmarks.trend.forms import FORMS, ShortForm

PAGE = Path("docs/benchmarks.md")
MADE = "<!-- Made by `make bench-all` from docs/figures. -->"
Classes = dict[str, dict[str, Any]]


def page(directory: Path = DIRECTORY) -> str:
    """Return the page. Each `{{section}}` of the template becomes the table of that short form.

    Raises: ValueError, if a section has no place in the template, or figures are of no short form.
    """
    classes: Classes = {file.stem: json.loads(file.read_text()) for file in sorted(directory.glob("*.json"))}
    tables = {form.section: "\n".join(_table(form, classes)) for form in FORMS}
    text = (directory / "benchmarks.template").read_text()
    unknown = {section for figures in classes.values() for section in figures} - {*tables}
    left = {*tables} - {*re.findall(r"\{\{(\w+)\}\}", text)}
    if unknown or left:
        raise ValueError(f"unknown sections: {sorted(unknown)}; not in the template: {sorted(left)}")
    return f"{MADE}\n\n" + re.sub(r"\{\{(\w+)\}\}", lambda match: tables[match[1]], text)


def _table(form: ShortForm, classes: Classes) -> Iterator[str]:
    """Yield the lines of a table with a column for each class that has figures."""
    found = {name: sections[form.section] for name, sections in classes.items() if form.section in sections}
    if not found:
        yield fill(f"`{form.benchmark}`: {form.question} No figures yet.", 120, break_on_hyphens=False)
        return
    labels = dict.fromkeys(figure.label for figure in form.figures)
    if unknown := {label for run in found.values() for label in run["figures"]} - labels.keys():
        raise ValueError(f"{form.section}: no such figures: {sorted(unknown)}")
    origins = (f"{name}: {_origin(form, run)}" for name, run in found.items())
    yield f"| `{form.benchmark}`: {form.question} | {' | '.join(origins)} |"
    yield "|---" * (1 + len(found)) + "|"
    for label in labels:
        if any(label in run["figures"] for run in found.values()):
            cells = (_cell(run["figures"][label]) if label in run["figures"] else "" for run in found.values())
            yield f"| {label.strip()} | {' | '.join(cells)} |"


def _origin(form: ShortForm, run: dict[str, Any]) -> str:
    short = form.arguments.replace("'", "")
    arguments = "" if run["arguments"] == short else f"`{run['arguments'] or 'no arguments'}`"
    return "; ".join(part for part in (run["date"], run["cpu"], arguments, run.get("note", "")) if part)


def _cell(figure: Sequence[float]) -> str:
    """Return a value, and the least and the most in parentheses if there are these."""
    value, *spread = map(_number, figure)
    return f"{value} ({' to '.join(spread)})" if spread else value


def _number(value: float) -> str:
    """Return about three digits, without an exponent."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{2 if abs(value) >= 0.1 else 4}f}" if abs(value) < 10 else f"{value:.1f}"
