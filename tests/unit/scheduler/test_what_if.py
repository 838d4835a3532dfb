"""The cost model and the figures of a what-if."""

import numpy as np
import pytest

from protocol.codec import pack
from protocol.requests import GenerateRequest
from protocol.sampling import SamplingParams
from protocol.steps import SchedulerOutput
from services.config import SchedulerConfig
from services.scheduler.core.limits import Limits
from services.scheduler.recording.records import VERSION, RecordingHeader
from services.scheduler.what_if import History, Measurements, RequestMeasurement, StepCost
from services.scheduler.what_if.cost import MIN_STEPS, features_of
from services.scheduler.what_if.history import RecordedRequest
from services.scheduler.what_if.simulation import ModelledDevice, WhatIf
from tests.simulation.grammar import structured


def plan(starts: list[int], counts: list[int], samples: list[bool], drafts: list[int], proposed: int = 0):
    rows = range(len(starts))
    return SchedulerOutput(
        1,
        1,
        pack([*rows]),
        pack([0] * len(starts)),
        pack(starts),
        pack(counts),
        np.array(samples).tobytes(),
        drafts=pack(drafts) if any(drafts) else b"",
        num_speculative_tokens=proposed,
    )


def test_features_count_prefill_decode_context_and_drafts() -> None:
    step = plan([0, 100, 40], [8, 1, 3], [False, True, True], [0, 0, 2], proposed=2)
    context = 8 * 4 + 1 * 100.5 + 3 * 41.5
    assert features_of(step).tolist() == [1, 8, 2, context, 2, 4]


def test_the_fit_finds_the_coefficients_and_ignores_delayed_steps() -> None:
    rng = np.random.default_rng(0)
    true = np.array((2e-3, 1e-5, 3e-4, 1e-8, 0.0, 0.0))
    features = [np.array((1, *rng.integers(0, (400, 60, 20_000)), 0, 0), np.float64) for _ in range(300)]
    seconds = [float(x @ true) for x in features]
    seconds[7] *= 50
    cost = StepCost.fit(features, seconds)
    np.testing.assert_allclose(cost.seconds, true, rtol=0.02, atol=1e-9)
    assert cost.error < 0.01


def test_no_coefficient_is_negative() -> None:
    features = [np.array((1, n, 0, 0, 0, 0), np.float64) for n in range(1, 60)]
    cost = StepCost.fit(features, [1.0 / n for n in range(1, 60)])
    assert (cost.seconds >= 0).all()


def test_a_draft_without_history_costs_as_much_as_a_decode() -> None:
    cost = StepCost(np.array((1.0, 0, 0.5, 0, 0, 0)), 0.0, 50, np.array([True] * 4 + [False] * 2))
    assert cost.of(plan([10], [4], [True], [3])) == pytest.approx(1 + 0.5 + 3 * 0.5)


def test_too_few_steps_are_refused_with_their_number() -> None:
    with pytest.raises(ValueError, match=f"has 3 steps.*needs {MIN_STEPS}"):
        StepCost.fit([np.ones(6)] * 3, [1.0] * 3)


def test_figures_of_requests() -> None:
    measured = Measurements([RequestMeasurement(0.0, 1.0, 3.0, 5), RequestMeasurement(1.0, 1.5, 5.0, 1)], 2)
    figures = {figure.name: figure.value for figure in measured.figures()}
    assert figures["throughput"] == pytest.approx(6 / 5)
    assert figures["TTFT, mean"] == pytest.approx(750)
    assert figures["ITL, mean"] == pytest.approx(500)
    assert figures["preemptions"] == 2


def load(is_constrained: bool) -> History:
    """Return the history of six requests that began together, of 20 to 25 tokens; with grammars, every second one has
    one."""
    requests = []
    for number in range(6):
        prompt = [*range(8 + number)]
        grammar = structured(number) if is_constrained and number % 2 else None
        params = SamplingParams(12, temperature=0.0)
        message = GenerateRequest(number, pack(prompt), len(prompt), params, structured=grammar)
        tokens = np.array(prompt + [5] * 12, np.int32)
        requests.append(RecordedRequest(0.0, 1, message, tokens, len(tokens), grammar_seconds=0.01 * number))
    return History(requests)


def measured(history: History, limits: Limits, depth: int) -> Measurements:
    """Serve a load with steps of 10 ms."""
    header = RecordingHeader(VERSION, 1, 0, True, "{}", limits, 1, 64, 0, True, "test")
    config = SchedulerConfig(batch_queue_depth=depth, max_num_seqs=8)
    cost = StepCost(np.array((1e-2, 0.0, 0.0, 0.0, 0.0, 0.0)), 0.0, MIN_STEPS, np.ones(6, np.bool_))
    device = ModelledDevice(cost, gap=1e-3, latency=2e-3, acceptance=None)
    return WhatIf(header, config, limits, history, device).run()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("leaves_rows_out", [False, True])
def test_constrained_requests_are_served(leaves_rows_out: bool, depth: int) -> None:
    """The masks of a step come in one message, or in several while later steps are in flight."""
    limits = Limits(8, 64, 64, 64, 4, leaves_rows_out=leaves_rows_out)
    served = measured(load(is_constrained=True), limits, depth)
    assert (sorted(request.num_outputs for request in served.requests), served.num_refused) == ([12] * 6, 0)


def test_requests_that_are_longer_than_the_context_are_counted_and_left_out() -> None:
    served = measured(load(is_constrained=False), Limits(8, 64, 22, 64, 4), 2)
    assert (len(served.requests), served.num_refused) == (3, 3)
