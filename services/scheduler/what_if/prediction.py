"""Figures of a recorded load under other settings, with their ranges."""

from typing import NamedTuple

from services.config import SchedulerConfig
from services.scheduler.recording.records import RecordingHeader
from services.scheduler.recording.settings import settings_of
from services.scheduler.what_if.cost import StepCost
from services.scheduler.what_if.history import History
from services.scheduler.what_if.measurements import Measurements, RequestMeasurement
from services.scheduler.what_if.simulation import ModelledDevice, WhatIf, limits_for

_ROUNDS = 8
_EXACT = 0.01
"""Relative error of the latency that the factor gives."""
_LARGEST = 2.0
"""A model whose times must be this much longer, or shorter, does not describe the recording."""
_MARGIN = 1.05
"""Times of the same work differ by this factor at least from run to run."""
_SURE = 1.15 / 0.85
"""A figure whose upper end is more than this multiple of its lower end, about 15 % to both sides, is not predicted."""


class Range(NamedTuple):
    """A figure of the changed settings."""

    value: float
    low: float
    high: float

    @property
    def is_known(self) -> bool:
        return not self.high > _SURE * self.low


class FittedModel:
    """The fitted model of a recording.

    Attributes:
        costs: the best fit, then those that explain the recording as well.
        factor: all times are longer by it, so that the recorded settings give the recorded latency. It stands for what
            the model does not contain.
        modelled: what the model gives for the recorded settings.
    """

    def __init__(self, header: RecordingHeader, history: History) -> None:
        """Raises: ValueError, if there are too few steps, or no factor gives the recorded latency."""
        self._header, self._history = header, history
        self.costs, self.host = [*history.costs()], history.host()
        settings, target = settings_of(header), _latency(recorded(history))
        latency = target
        low, self.factor, high = 1 / _LARGEST, 1.0, _LARGEST
        for _ in range(_ROUNDS):
            self.modelled = self._run(settings, None, self.costs[0], self.factor)
            latency = _latency(self.modelled)
            if not abs(latency / target - 1) > _EXACT:
                return
            low, high = (self.factor, high) if latency < target else (low, self.factor)
            self.factor = (low * high) ** 0.5
        if max(self.factor, 1 / self.factor) > 0.98 * _LARGEST:
            raise ValueError(
                f"the recorded settings give {1e3 * latency:.1f} ms between tokens in the model and gave "
                f"{1e3 * target:.1f} ms in the recording; other work ran beside it, so that nothing can be predicted"
            )

    def predict(self, config: SchedulerConfig, acceptance: float | None) -> tuple[Measurements, list[Range]]:
        """Return what other settings would have done, and its figures with their ranges. The range covers every fit,
        times that are shorter or longer by what the model lacks, and with an acceptance, all or none of the rejected
        drafts verified.

        Raises: ValueError
        """
        margin = max(_MARGIN, self.factor, 1 / self.factor)
        best, factor = self.costs[0], self.factor
        variants = [(cost, factor, 0.5) for cost in self.costs]
        variants += [(best, factor / margin, 0.5), (best, factor * margin, 0.5)]
        variants += [(best, factor, 0.0), (best, factor, 1.0)] if acceptance is not None else []
        runs = [self._run(config, acceptance, *variant) for variant in variants]
        columns = zip(*([figure.value for figure in run.figures()] for run in runs), strict=True)
        return runs[0], [Range(values[0], min(values), max(values)) for values in columns]

    def _run(
        self, config: SchedulerConfig, acceptance: float | None, cost: StepCost, factor: float, found: float = 0.5
    ) -> Measurements:
        device = ModelledDevice(cost.scaled(factor), self.host.scaled(factor), acceptance, found)
        return WhatIf(self._header, config, limits_for(self._header, config), self._history, device).run()


def recorded(history: History) -> Measurements:
    ended = [request for request in history.requests if request.ended]
    measured = [RequestMeasurement(r.arrived, r.first_token, r.ended, r.num_outputs) for r in ended]
    return Measurements(measured, history.num_preemptions)


def _latency(measured: Measurements) -> float:
    """Return the seconds between tokens, or until the first one if no request has more."""
    figures = {figure.name: figure.value for figure in measured.figures()}
    between = figures["ITL, mean"]
    return (between if between > 0 else figures["TTFT, mean"]) / 1e3
