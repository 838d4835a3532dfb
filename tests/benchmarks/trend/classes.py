"""Figures of each class of machine, in docs/figures/CLASS.json: features of the processor, and number of cores."""

import json
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.trend.forms import BRANCH, FORMS, Shown

DIRECTORY = Path("docs/figures")
NAMES = {
    "amx_bf16": "amx",
    "avx512_bf16": "avx512-bf16",
    "avx512_vnni": "avx512-vnni",
    "avx512f": "avx512",
    "avx2": "avx2",
}
"""Names of classes by the feature that makes most of the difference, the most telling one first."""


def class_of(machine: Mapping[str, Any]) -> str:
    best = next((name for feature, name in NAMES.items() if feature in machine["features"]), "plain")
    return f"{best}-{machine['cores']}"


def merge(section: str, report: Mapping[str, Any], note: str = "", directory: Path = DIRECTORY) -> Path:
    """Write the figures of a benchmark's report into the file of its class, in place of those of an earlier run.

    Raises: LookupError, if the report has none of the figures.
    """
    form = next(form for form in FORMS if form.section == section)
    figures: dict[str, list[float]] = {}
    for figure in form.figures:
        try:
            figures[figure.label] = measured(figure, report)
        except (
            LookupError,
            TypeError,
            ValueError,
            ArithmeticError,
        ):  # not part of the short form, or not on this processor
            continue
    if not figures:
        raise LookupError(f"the report of {form.benchmark} has none of its figures")
    file = directory / f"{class_of(report['machine'])}.json"
    content = json.loads(file.read_text()) if file.exists() else {}
    content[section] = {
        "date": report["date"][:10],
        "cpu": report["machine"]["cpu"],
        "arguments": " ".join(report["settings"]["arguments"]),
        **({"note": note} if note else {}),
        "figures": figures,
    }
    order = [form.section for form in FORMS]
    text = json.dumps(dict(sorted(content.items(), key=lambda one: order.index(one[0]))), indent=1)
    # A figure is one line, so that a change of it is, too.
    file.write_text(re.sub(r"\[\s+([^][]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n")
    return file


def measured(figure: Shown, report: Mapping[str, Any]) -> list[float]:
    """Return the value, and the least and the most of the repeats if there are several.

    Raises: LookupError, TypeError
    """
    each = _found(report, figure.each.split(BRANCH)) if figure.each else []
    if figure.over:
        each = [one / other for one, other in zip(each, _found(report, figure.over.split(BRANCH)), strict=True)]
    value = _found(report, figure.path.split(BRANCH)) if figure.path else statistics.median(each)
    spread = [min(each), max(each)] if len(each) > 1 else []
    return [float(f"{float(number):.4g}") for number in (value, *spread)]


def _found(value: Any, path: list[str]) -> Any:
    for at, key in enumerate(path):
        if key == "*":
            return [_found(item, path[at + 1 :]) for item in value]
        if isinstance(value, list) and "=" in key:
            wanted = [part.split("=") for part in key.split("; ")]
            value = next((row for row in value if all(str(row[name]) == text for name, text in wanted)), None)
        else:
            value = value[int(key) if isinstance(value, list) else key]
    return value
