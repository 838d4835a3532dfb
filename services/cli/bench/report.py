"""The printed report of a load: groups and titles of `vllm bench serve`, and charts over time."""

from collections.abc import Iterator, Mapping
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from services.cli.bench.load import LoadResult

WIDTH = 50
CHART_HEIGHT = 8
"""Lines of a chart."""
_LEVELS = " ▁▂▃▄▅▆▇█"
"""Heights of a line's cell, in eighths."""

_TOTALS = (
    ("Successful requests", "completed"),
    ("Failed requests", "failed"),
    ("Maximum request concurrency", "max_concurrency"),
    ("Request rate configured (RPS)", "request_rate"),
    ("Benchmark duration (s)", "duration"),
    ("Total input tokens", "total_input_tokens"),
    ("Total generated tokens", "total_output_tokens"),
    ("Request throughput (req/s)", "request_throughput"),
    ("Output token throughput (tok/s)", "output_throughput"),
    ("Peak output token throughput (tok/s)", "max_output_tokens_per_s"),
    ("Peak concurrent requests", "max_concurrent_requests"),
    ("Total token throughput (tok/s)", "total_token_throughput"),
)
"""Label and metric."""
_TIMES = (
    ("Time to First Token", "TTFT"),
    ("Time per Output Token (excl. 1st token)", "TPOT"),
    ("Inter-token Latency", "ITL"),
    ("End-to-end Latency", "E2EL"),
)
"""Title of a group and the metric's short name."""
_STATISTICS = ("Mean", "Median", "P99")


def report(result: Mapping[str, object]) -> Iterator[str]:
    """Yield the lines of the report. A total that the load did not limit (null, "inf") is left out."""
    yield f"{' Serving Benchmark Result ':=^{WIDTH}}"
    for label, name in _TOTALS:
        if result[name] not in (None, "inf"):
            yield _line(label, result[name])
    for title, short in _TIMES:
        yield f"{title:-^{WIDTH}}"
        for statistic in _STATISTICS:
            value = result[f"{statistic.lower()}_{short.lower()}_ms"]
            yield _line(f"{statistic} {short} (ms)", value)
    yield "=" * WIDTH


def _line(label: str, value: object) -> str:
    return f"{label + ':':<40} {value:<9.2f}".rstrip() if isinstance(value, float) else f"{label + ':':<40} {value}"


def charts(load: LoadResult) -> Iterator[str]:
    """Yield charts of the output tokens per second and of the open requests, over the whole load."""
    done = [request for request in load.requests if not request.error]
    if not done:
        return
    start, end = min(r.started for r in done), max(r.ended for r in done)
    edges = np.linspace(start, max(end, start + 1e-3), WIDTH + 1)
    arrivals = np.fromiter(chain.from_iterable(r.arrivals for r in done), float)
    tokens = np.histogram(arrivals, edges)[0] / np.diff(edges)
    middles = (edges[1:] + edges[:-1]) / 2
    began = np.searchsorted(np.sort([r.started for r in done]), middles)
    ended = np.searchsorted(np.sort([r.ended for r in done]), middles)
    for title, values in (("Output tokens per second", tokens), ("Open requests", (began - ended).astype(float))):
        yield from _chart(title, values, float(edges[-1] - edges[0]))


def _chart(title: str, values: NDArray[np.float64], seconds: float) -> Iterator[str]:
    """Yield the lines of a chart with one column per value, from 0 to the largest one."""
    peak = float(values.max())
    eighths = np.ceil(values / (peak or 1.0) * CHART_HEIGHT * 8).astype(int)
    yield f"{f'{title}, 0 to {peak:,.0f}':-^{WIDTH}}"
    for line in reversed(range(CHART_HEIGHT)):
        yield "".join(_LEVELS[cell] for cell in np.clip(eighths - 8 * line, 0, 8)).rstrip()
    last = f"{seconds:.1f} s"
    yield f"0 s{last:>{WIDTH - 3}}"
