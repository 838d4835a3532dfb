"""The prediction of `runahead replay DIR --SETTING VALUE`: a table and a chart."""

import importlib.util
import json
import math
from collections.abc import Iterator
from typing import NamedTuple

from services.cli.settings import ConfigurationError, merge
from services.config import ReplayConfig, SchedulerConfig, WhatIfConfig, flag
from services.scheduler.capabilities import Combination, refusal
from services.scheduler.policies import make_policy
from services.scheduler.recording import EventRecording, RecordingHeader, settings_of
from services.scheduler.what_if import FEATURES, Figure, FittedModel, History, Range, limits_for, recorded

COLUMNS = ("recorded", "model", "what if")
"""Measured; predicted for the recorded settings; predicted for the changed ones."""
_WIDTH = 40
"""Characters of the longest bar."""
Table = list[tuple[Figure, Figure, Range]]


class Prediction(NamedTuple):
    model: FittedModel
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
        raise ConfigurationError("--chart needs matplotlib: pip install matplotlib")
    changed_settings(config, recording.header)  # what is not possible is refused before the recording is read
    history = History.read(recording)
    print("what if: " + ", ".join(f"{name} {value}" for name, value in _named(config)))
    model, table, num_refused, num_requests = predict(config, recording.header, history)
    print("\n".join(_describe(model)))
    print("\n".join([*_table(table), "", *_bars(table)]))
    if num_refused:
        print(f"what if refuses {num_refused:,} of {num_requests:,} requests: they do not fit its context or its cache")
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


def predict(config: ReplayConfig, header: RecordingHeader, history: History) -> Prediction:
    """Run the recorded load with both settings.

    Raises: RecordingError; ConfigurationError, if the recording does not tell what the change costs; ValueError
    """
    before, after = settings_of(header), changed_settings(config, header)
    check_drafts(before, after, config.draft_acceptance, history)
    model = FittedModel(header, history)
    changed, ranges = model.predict(after, config.draft_acceptance)
    columns = (recorded(history).figures(), model.modelled.figures(), ranges)
    return Prediction(model, [*zip(*columns, strict=True)], changed.num_refused, len(history.requests))


def check_drafts(before: SchedulerConfig, after: SchedulerConfig, acceptance: float | None, history: History) -> None:
    """Refuse drafts of which the recording tells neither the cost nor the chance.

    Raises: ConfigurationError
    """
    old, new = before.speculative_config, after.speculative_config
    if old == new:
        return
    for drafting in (old, new):
        if drafting is not None and drafting.method != "ngram":
            raise ConfigurationError(
                f"the recording does not tell what the {drafting.method} drafter alone costs; record both settings"
            )
    if new is None or acceptance is not None:
        return
    if not history.drafted:
        raise ConfigurationError("the recording has no drafts; set --draft-acceptance")
    if old is not None and new.num_speculative_tokens > old.num_speculative_tokens:
        raise ConfigurationError(
            f"the recording has at most {old.num_speculative_tokens} drafts per token; set --draft-acceptance"
        )


def _named(config: ReplayConfig) -> Iterator[tuple[str, object]]:
    """Yield flag and value of each change."""
    fields = [*WhatIfConfig.model_fields, "draft_acceptance"]
    for name, value in config.model_dump(include=set(fields), exclude_none=True).items():
        yield flag(name), json.dumps(value) if isinstance(value, dict) else value


def _describe(model: FittedModel) -> Iterator[str]:
    cost, host = model.costs[0], model.host
    parts = [
        f"{_duration(value)} a {name}" for name, value in zip(FEATURES, cost.seconds.tolist(), strict=True) if value
    ]
    yield (
        f"cost model from {cost.num_steps:,} steps: {', '.join(parts)}; median error {100 * cost.error:.0f} %, "
        f"{100 * (cost.delays - 1):.0f} % delays; "
        f"fits as good: {len(model.costs) - 1}"
    )
    yield (
        f"scheduler: {_duration(host.turn[0])} a step, {_duration(host.turn[1])} a row; "
        f"{_duration(host.sending[0])} to the worker, {_duration(host.returning)} back; "
        f"a second of its work makes the step beside it {cost.shared:.2f} s longer"
    )
    yield f"all times x {model.factor:.2f}, so that the recorded settings give the recorded latency"


def _duration(seconds: float) -> str:
    """Return three digits with a unit."""
    for unit, factor in (("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 0.9995:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _table(table: Table) -> Iterator[str]:
    yield f"{'':14}{'':9}" + "".join(f"{name:>12}" for name in (*COLUMNS, "from", "to")) + f"{'change':>10}"
    for before, modelled, after in table:
        values = _values(before, modelled, after)
        change = 100 * (values[2] / values[1] - 1) if values[1] else math.nan
        numbers = "".join(f"{_number(value):>12}" for value in (*values, after.low, after.high))
        yield f"{before.name:14}{before.unit:9}{numbers}" + ("" if math.isnan(change) else f"{f'{change:+.0f} %':>10}")
    yield "from, to: what the recording allows; a figure whose range is too wide is not predicted (-)"
    yield "change: what if against model, so that the error of the model does not count"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _values(before: Figure, modelled: Figure, after: Range) -> list[float]:
    return [before.value, modelled.value, after.value if after.is_known else math.nan]


def _bars(table: Table) -> Iterator[str]:
    """Yield a chart of text: a bar for each figure and column."""
    for sides in table:
        values = _values(*sides)
        longest = max((value for value in values if not math.isnan(value)), default=0.0)
        for name, value in zip(COLUMNS, values, strict=True):
            title = sides[0].name if name == COLUMNS[0] else ""
            length = 0 if not longest or math.isnan(value) else round(_WIDTH * value / longest)
            yield f"{title:14}{name:>9} {'█' * length}"


def _draw(table: Table, file: str) -> None:
    """Raises: ConfigurationError, if the file cannot be written."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(table), figsize=(2.2 * len(table), 3))
    for plot, sides in zip(axes, table, strict=True):
        plot.bar(COLUMNS, [0.0 if math.isnan(value) else value for value in _values(*sides)])
        plot.set_title(f"{sides[0].name}\n{sides[0].unit}", fontsize=9)
        plot.tick_params(labelsize=7)
    figure.tight_layout()
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--chart {file}: {error}") from None
