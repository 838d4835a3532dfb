"""Counter and histogram without locks, for one thread.

With prometheus_client's own, the locks double the cost of a token.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

OURS = "runahead:"
"""Prefix of every metric's name."""
LABELS = ("model_name", "engine")
"""Labels of every metric."""


def histogram_family(
    name: str, text: str, bounds: Iterable[float], counts: Iterable[float], total: float, labels: Sequence[str]
) -> HistogramMetricFamily:
    """Return a family.

    Args:
        counts: values in each bucket, one more than `bounds`.
    """
    family = HistogramMetricFamily(name, text, labels=LABELS)
    names = [*map(floatToGoString, [*bounds, float("inf")])]
    family.add_metric(labels, [*zip(names, map(float, accumulate(counts)), strict=True)], total)
    return family


class ValueHistogram(Collector):
    """Values are appended to an array, which costs 0.1 µs, and sorted into buckets by `fold`, many at a time."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, str]) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = np.array(buckets, np.float64)
        self._counts = np.zeros(len(buckets) + 1, np.int64)
        self._sum = 0.0
        self._values = array("d")
        self.observe: Callable[[float], None] = self._values.append

    def fold(self) -> None:
        """Count the values that were observed since the last call."""
        values = np.array(self._values)
        del self._values[:]
        self._counts += np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._counts))
        self._sum = float(sum(values.tolist(), self._sum))

    def collect(self) -> Iterator[Metric]:
        self.fold()
        bounds, counts = self._bounds.tolist(), self._counts.tolist()
        yield histogram_family(self._name, self._text, bounds, counts, self._sum, self._labels)


@dataclass(eq=False)
class Total(Collector):
    """Counter with labels beside those of every metric."""

    _name: str
    _text: str
    _more_labels: tuple[str, ...]
    _labels: tuple[str, ...]
    """Values of those of every metric; (): this one has none of them."""
    _counts: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """By values of the other labels."""

    def add(self, *labels: str, count: int = 1) -> None:
        """Add to the count of these values of the other labels. With 0 it begins, and is exported from then on."""
        self._counts[labels] += count

    def collect(self) -> Iterator[Metric]:
        names = (*LABELS[: len(self._labels)], *self._more_labels)
        family = CounterMetricFamily(self._name, self._text, labels=names)
        for labels, count in self._counts.items():
            family.add_metric((*self._labels, *labels), count)
        yield family
