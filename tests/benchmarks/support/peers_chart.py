"""Chart of servers side by side."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw(repeats: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]], title: str, file: Path) -> str:
    """Draw tokens/s (bars: medians, lines: least to most), one panel per number of streams. Return a line about it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no chart: matplotlib is not installed; install it from a checkout: pip install -e '.[bench]'"
    names = list(dict.fromkeys(name for name, _ in repeats))
    numbers = sorted({streams for _, streams in repeats})
    figure = Figure(figsize=(10, 0.9 + 0.32 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(numbers), sharey=True, squeeze=False)[0]
    for panel, streams in zip(panels, numbers, strict=True):
        for place, name in enumerate(names):
            speeds = [run["output_throughput"] for run in repeats.get((name, streams), ())]
            if not speeds:
                continue
            middle = statistics.median(speeds)
            spread = [[middle - min(speeds)], [max(speeds) - middle]]
            colour = "tab:blue" if name.startswith("runahead") else "tab:gray"
            panel.barh(place, middle, 0.7, color=colour, xerr=spread)
            panel.text(0, place, f" {middle:,.0f}", va="center", color="white")
        panel.set_title(f"{streams} streams" if streams > 1 else "1 stream")
        panel.set_yticks(range(len(names)), names)
        panel.set_xlabel("output tokens/s")
    panels[0].invert_yaxis()
    figure.suptitle(title)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=80)
    return f"chart written to {file}"
