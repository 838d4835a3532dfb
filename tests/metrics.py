"""Samples of a page of /metrics."""

import re
from typing import NamedTuple


class Sample(NamedTuple):
    labels: dict[str, str]
    value: float


def samples(page: str, name: str, **labels: str) -> list[Sample]:
    """Return the samples of this full name that have these labels."""
    found = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", page, re.MULTILINE)
    parsed = (Sample(dict(re.findall(r'(\w+)="(.*?)"', text)), float(value)) for text, value in found)
    return [sample for sample in parsed if labels.items() <= sample.labels.items()]


def total(page: str, name: str, **labels: str) -> float:
    """Return the sum of these samples; 0.0 if there are none."""
    return sum(sample.value for sample in samples(page, name, **labels))
