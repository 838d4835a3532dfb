"""The prediction of `runahead replay DIR --SETTING VALUE`: a table and a chart."""

import importlib.util
import json
import math
from collections.abc import Iterator
from typing import NamedTuple

from services.cli.settings import ConfigurationError, flag, merge
from services.config import ReplayConfig, SchedulerConfig, WhatIfConfig
from services.scheduler.capabilities import Combination, refusal
from services.scheduler.policies import make_policy
from services.scheduler.recording import EventRecording, RecordingHeader, settings_of
from services.scheduler.what_if import (
    FEATURES,
    Figure,
    History,
    Measurements,
    ModelledDevice,
    RequestMeasurement,
    StepCost,
    WhatIf,
    limits_for,
)

COLUMNS = ("recorded", "model", "what if")
"""Measured; predicted for the recorded settings; predicted for the changed ones."""
_WIDTH = 40
"""Characters of the longest bar."""
Table = list[tuple[Figure, Figure, Figure]]


class Prediction(NamedTuple):
    table: Table
    """Each figure as recorded, predicted for the recorded settings, and predicted for the changed ones."""
    num_refused: int
    """Requests that the changed settings have no room for; they are left out of the last column."""
    num_requests: int


def print_prediction(config: ReplayConfig, recording: EventRecording) -> int:
    """Print the prediction for the changed settings. Return 0.

    Raises: ConfigurationError; RecordingError; ValueError, if the settings contradict one another.
    """
    if config.chart and importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("--chart needs matplotlib: pip install 'runahead-engine[bench]'")
    changed_settings(config, recording.header)  # what is not possible is refused before the recording is read
    history = History.read(recording)
    cost = history.cost()
    print(_describe_cost(cost, history))
    print("what if: " + ", ".join(f"{name} {value}" for name, value in _named(config)))
    table, num_refused, num_requests = predict(config, recording.header, history, cost)
    print("\n".join([*_table(table), "", *_bars(table)]))
    if num_refused:
        print(
            f"what if refuses {num_refused:,} of {num_requests:,} requests: they do not fit its context or its cache"
        )
    if recording.torn:
        print(recording.torn)
    if config.chart:
        _draw(table, config.chart)
    return 0


def changed_settings(config: ReplayConfig, header: RecordingHeader) -> SchedulerConfig:
    """Return the recorded settings with the changes.

    Raises: RecordingError; ConfigurationError, if the recorded workers cannot be used so; ValueError, if the context
        does not fit the blocks.
    """
    before = settings_of(header).model_dump(exclude_unset=True)
    after = merge(SchedulerConfig, before | config.changes, environ={}).config
    if (reason := refusal(Combination.from_config(after, header.backend))) is not None:
        raise ConfigurationError(reason)
    if config.draft_acceptance is not None and after.speculative_config is None:
        raise ConfigurationError("--draft-acceptance needs drafts: set --speculative-config")
    make_policy(after, limits_for(header, after))
    return after


def predict(config: ReplayConfig, header: RecordingHeader, history: History, cost: StepCost) -> Prediction:
    """Run the recorded load with both settings.

    Raises: RecordingError, ConfigurationError, ValueError
    """
    before, after = settings_of(header), changed_settings(config, header)
    acceptance = config.draft_acceptance
    if after.speculative_config is not None and acceptance is None and not history.drafted:
        raise ConfigurationError("the recording has no drafts; set --draft-acceptance")
    modelled = _run(header, before, history, ModelledDevice(cost, history.gap, history.latency, None))
    changed = _run(header, after, history, ModelledDevice(cost, history.gap, history.latency, acceptance))
    columns = [side.figures() for side in (recorded(history), modelled, changed)]
    return Prediction([*zip(*columns, strict=True)], changed.num_refused, len(history.requests))


def recorded(history: History) -> Measurements:
    measured = Measurements(num_preemptions=history.num_preemptions)
    for request in history.requests:
        if request.ended:
            measured.add(
                RequestMeasurement(request.arrived, request.first_token, request.ended, request.num_outputs)
            )
    return measured


def _run(
    header: RecordingHeader, config: SchedulerConfig, history: History, device: ModelledDevice
) -> Measurements:
    return WhatIf(header, config, limits_for(header, config), history, device).run()


def _named(config: ReplayConfig) -> Iterator[tuple[str, object]]:
    """Yield flag and value of each change."""
    fields = [*WhatIfConfig.model_fields, "draft_acceptance"]
    for name, value in config.model_dump(include=set(fields), exclude_none=True).items():
        yield flag(name), json.dumps(value) if isinstance(value, dict) else value


def _describe_cost(cost: StepCost, history: History) -> str:
    parts = [
        f"{_duration(value)} a {name}"
        for name, value in zip(FEATURES, cost.seconds.tolist(), strict=True)
        if value
    ]
    return (
        f"cost model from {cost.num_steps:,} steps: {', '.join(parts)}; median error {100 * cost.error:.0f} %; "
        f"{1e3 * history.latency:.2f} ms from dispatch to result besides, {1e3 * history.gap:.2f} ms between steps"
    )


def _duration(seconds: float) -> str:
    """Return three digits with a unit."""
    for unit, factor in (("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _table(table: Table) -> Iterator[str]:
    yield f"{'':14}{'':9}" + "".join(f"{name:>12}" for name in COLUMNS) + f"{'change':>10}"
    for sides in table:
        measured, modelled, changed = (side.value for side in sides)
        change = f"{100 * (changed / modelled - 1):+.0f} %" if modelled else ""
        values = "".join(f"{_number(value):>12}" for value in (measured, modelled, changed))
        yield f"{sides[0].name:14}{sides[0].unit:9}{values}{change:>10}"
    yield "change: what if against model, so that the error of the model does not count"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _bars(table: Table) -> Iterator[str]:
    """Yield a chart of text: a bar for each figure and column."""
    for sides in table:
        longest = max((side.value for side in sides if not math.isnan(side.value)), default=0.0)
        for name, side in zip(COLUMNS, sides, strict=True):
            title = side.name if name == COLUMNS[0] else ""
            length = 0 if not longest or math.isnan(side.value) else round(_WIDTH * side.value / longest)
            yield f"{title:14}{name:>9} {'█' * length}"


def _draw(table: Table, file: str) -> None:
    """Raises: ConfigurationError, if the file cannot be written."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(table), figsize=(2.2 * len(table), 3))
    for plot, sides in zip(axes, table, strict=True):
        plot.bar(COLUMNS, [0.0 if math.isnan(side.value) else side.value for side in sides])
        plot.set_title(f"{sides[0].name}\n{sides[0].unit}", fontsize=9)
        plot.tick_params(labelsize=7)
    figure.tight_layout()
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--chart {file}: {error}") from None
