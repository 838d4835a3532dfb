"""The number of drafts that adapts, in the production core on a virtual clock.

The acceptance of drafts and the times of steps are given, so the best fixed number is known.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from services.config import SchedulerConfig
from services.scheduler.build import CoreFactory
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import Event, StepDispatched
from services.scheduler.recording import (
    EventRecording,
    FlightRecorder,
    RecordingHeader,
    Replay,
    SegmentWriter,
    describe,
)
from services.scheduler.recording.records import VERSION
from services.scheduler.recording.settings import recorded_settings
from services.scheduler.what_if import History, HostCost, StepCost
from services.scheduler.what_if.cost import MIN_STEPS
from services.scheduler.what_if.history import RecordedRequest
from services.scheduler.what_if.simulation import ModelledDevice, WhatIf
from tests.simulation.requests import generate

MOST, PROMPT, BLOCK, VOCAB = 3, 8, 16, 64


class DraftCosts(NamedTuple):
    """Milliseconds of a step, of each of its rows, and of each verified and each proposed draft."""

    step: float = 1.0
    row: float = 0.05
    verified: float = 0.05
    proposed: float = 0.03


class Serving(NamedTuple):
    """Requests of equal length that are served together, `rows` at a time."""

    rows: int
    acceptance: float
    costs: DraftCosts = DraftCosts()
    output: int = 400
    """Tokens of each request."""

    @property
    def limits(self) -> Limits:
        blocks = self.rows * (PROMPT + self.output + BLOCK) // BLOCK + 2 * self.rows
        return Limits(self.rows, 256, PROMPT + self.output + 8, blocks, BLOCK, drafts_in_flight=2 * MOST)

    def config(self, drafts: int, adaptive: bool) -> SchedulerConfig:
        speculation = {"method": "ngram", "num_speculative_tokens": max(drafts, 1), "adaptive": adaptive}
        return SchedulerConfig(max_num_seqs=self.rows, speculative_config=json.dumps(speculation) if drafts else None)

    def header(self, config: SchedulerConfig) -> RecordingHeader:
        settings = recorded_settings(config)
        return RecordingHeader(VERSION, 1, 0, True, settings, self.limits, 1, VOCAB, 0, True, "test", is_start=True)

    def run(self, drafts: int, adaptive: bool = False, directory: Path | None = None) -> "ObservedNumbers":
        """Serve two requests after one another for each row. `directory`: the run is recorded there."""
        tokens = np.ones(PROMPT + self.output, np.int32)
        requests = []
        for number in range(2 * self.rows):
            message = generate([number % VOCAB] * PROMPT, number, max_tokens=self.output)
            requests.append(RecordedRequest(0.0, 1, message, tokens, len(tokens)))
        c = self.costs
        seconds = np.array((c.step, c.row, c.row, 0.0, c.verified, c.proposed)) * 1e-3
        cost = StepCost(seconds, 0.0, MIN_STEPS, np.ones(6, np.bool_))
        config = self.config(drafts, adaptive)
        device = ModelledDevice(cost, HostCost(np.zeros(3), np.zeros(3), 1e-4), self.acceptance, found=1.0)
        served = ObservedNumbers(what_if := WhatIf(self.header(config), config, self.limits, History(requests), device))
        what_if.core.observers.add(served)
        recorder = None
        if directory is not None:
            header = self.header(config)
            recorder = FlightRecorder(header, SegmentWriter(directory, lambda _: header, 1 << 30))
            what_if.core.observers.add(recorder)
        try:
            what_if.run()
        finally:
            if recorder is not None:
                recorder.close()
        return served


class ObservedNumbers:
    """An observer of a run."""

    def __init__(self, what_if: WhatIf) -> None:
        self.what_if = what_if
        self.numbers: list[int] = []
        """Number of drafts that each step proposed."""
        self.trials: list[bool] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, StepDispatched):
            self.numbers.append(event.step.proposes)
            self.trials.append(event.step.is_trial)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.what_if.measurements.figures()[0].value


FEW_ACCEPTED = Serving(1, 0.3, DraftCosts(proposed=0.1))
ROWS_COST_MUCH = Serving(8, 0.6, DraftCosts(row=0.2, verified=0.2))


@pytest.mark.parametrize("case", [FEW_ACCEPTED, ROWS_COST_MUCH])
def test_the_chosen_number_is_nearly_as_good_as_the_best_fixed_one(case: Serving) -> None:
    fixed = [case.run(number).rate for number in range(MOST + 1)]
    adaptive = case.run(MOST, adaptive=True)
    assert adaptive.rate > 0.95 * max(fixed), (adaptive.rate, fixed)
    assert 0 < sum(adaptive.trials) < 0.5 * len(adaptive.trials)


@pytest.mark.parametrize("rows", [1, 8])
def test_a_drafter_that_never_hits_is_given_up_and_its_trials_cost_one_per_cent(rows: int) -> None:
    case = Serving(rows, 0.0, DraftCosts(proposed=0.3 / rows, verified=0.3 / rows), output=700)
    numbers = case.run(MOST, adaptive=True).numbers[50:]
    assert numbers.count(0) > 0.97 * len(numbers)
    assert any(numbers), "drafts are tried again"
    lost = sum(numbers) * rows * (case.costs.proposed + case.costs.verified)
    assert lost < 0.011 * (lost + len(numbers) * (case.costs.step + rows * case.costs.row))


def test_a_recording_replays_with_the_same_numbers_of_drafts(tmp_path: Path) -> None:
    case = ROWS_COST_MUCH
    served = case.run(MOST, adaptive=True, directory=tmp_path)
    assert len(set(served.numbers)) > 2
    replay = Replay(EventRecording(tmp_path), CoreFactory(case.config(MOST, adaptive=True)))
    difference = replay.run()
    assert difference is None, describe(difference)
    assert replay.num_plans == len(served.numbers)
