"""The cost model and the figures of a what-if."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from protocol.codec import pack
from protocol.media import Media, MediaItem
from protocol.sampling import Pooling, SamplingParams
from protocol.steps import SchedulerOutput
from services.cli.settings import ConfigurationError
from services.cli.what_if import check_drafts
from services.config import SchedulerConfig
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import RequestArrived, TimeAdvanced
from services.scheduler.recording.recorder import FlightRecorder
from services.scheduler.recording.records import VERSION, RecordingHeader
from services.scheduler.recording.segments import EventRecording, SegmentWriter
from services.scheduler.recording.settings import recorded_settings
from services.scheduler.what_if import FittedModel, History, HostCost, Measurements, Range, RequestMeasurement, StepCost
from services.scheduler.what_if.cost import MIN_STEPS, Vector, features_of
from services.scheduler.what_if.history import Drafted, RecordedRequest
from services.scheduler.what_if.simulation import ModelledDevice, WhatIf, limits_for
from tests.simulation.grammar import structured
from tests.simulation.requests import generate


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


def best_fit(features: list[Vector], seconds: list[float]) -> StepCost:
    return next(StepCost.fits(features, seconds))


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
    cost = best_fit(features, seconds)
    np.testing.assert_allclose(cost.seconds[:4], true[:4], rtol=0.02, atol=1e-9)
    assert cost.error < 0.01


def test_no_coefficient_is_negative() -> None:
    features = [np.array((1, n, 0, 0, 0, 0), np.float64) for n in range(1, 60)]
    cost = best_fit(features, [1.0 / n for n in range(1, 60)])
    assert (cost.seconds >= 0).all()


def test_found_drafts_count_and_planned_ones_do_not() -> None:
    step = plan([100, 40], [4, 4], [True, True], [3, 3], proposed=3)
    found = features_of(step, np.array([0, 2], np.int32))
    assert found.tolist() == [1, 0, 2, 100.5 + 3 * 41.5, 2, 6]


def test_a_draft_without_history_costs_as_much_as_a_decode() -> None:
    features = [np.array((1, 0, rows, 0, 0, 0), np.float64) for rows in range(1, 60)]
    cost = best_fit(features, [1.0 + 0.5 * x[2] for x in features])
    assert cost.of(features_of(plan([10], [4], [True], [3]))) == pytest.approx(1 + 0.5 + 3 * 0.5, rel=1e-3)


def test_features_that_always_occur_together_give_more_than_one_fit() -> None:
    """Every row proposes three drafts: what a row and what a proposal costs cannot be told apart."""
    features = [np.array((1, 0, rows, 0, 0, 3 * rows), np.float64) for rows in range(1, 60)]
    fits = [*StepCost.fits(features, [1.0 + 0.5 * x[2] for x in features])]
    decodes = [cost.of_decodes(10, 1) for cost in fits]
    assert (min(decodes), max(decodes)) == pytest.approx((1.0, 6.0), rel=1e-2)


def test_more_drafts_than_recorded_need_a_chance() -> None:
    fewer, more = (
        SchedulerConfig(speculative_config={"method": "ngram", "num_speculative_tokens": count}) for count in (2, 4)
    )
    history = History(drafted=[Drafted(2, 1)])
    with pytest.raises(ConfigurationError, match="at most 2 drafts per token; set --draft-acceptance"):
        check_drafts(fewer, more, None, history)
    check_drafts(fewer, more, 0.5, history)
    check_drafts(more, fewer, None, history)


def test_too_few_steps_are_refused_with_their_number() -> None:
    with pytest.raises(ValueError, match=f"has 3 steps.*needs {MIN_STEPS}"):
        best_fit([np.ones(6)] * 3, [1.0] * 3)


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
        message = generate(prompt, number, max_tokens=12, structured=grammar)
        tokens = np.array(prompt + [5] * 12, np.int32)
        requests.append(RecordedRequest(0.0, 1, message, tokens, len(tokens), grammar_seconds=0.01 * number))
    return History(requests)


HOST = HostCost(np.zeros(3), np.array((1e-3, 0.0, 0.0)), 1e-3)


def header(limits: Limits, config: SchedulerConfig) -> RecordingHeader:
    return RecordingHeader(
        VERSION, 1, 0, True, recorded_settings(config), limits, 1, 64, 0, True, "test", is_start=True
    )


def served(history: History, limits: Limits, depth: int = 2, hidden_size: int = 0) -> tuple[list[int], int]:
    """Serve a load with steps of 10 ms, within the sizes that the recorded workers give.

    Return the number of output tokens of each request, and how many requests are refused.
    """
    config = SchedulerConfig(batch_queue_depth=depth, max_num_seqs=8, block_size=4, max_num_batched_tokens=64)
    head = replace(header(limits, config), hidden_size=hidden_size)
    cost = StepCost(np.array((1e-2, 0.0, 0.0, 0.0, 0.0, 0.0)), 0.0, MIN_STEPS, np.ones(6, np.bool_))
    result = WhatIf(head, config, limits_for(head, config), history, ModelledDevice(cost, HOST, None)).run()
    return [request.num_outputs for request in result.requests], result.num_refused


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("leaves_rows_out", [False, True])
def test_constrained_requests_are_served(leaves_rows_out: bool, depth: int) -> None:
    """The masks of a step come in one message, or in several while later steps are in flight."""
    limits = Limits(8, 64, 64, 64, 4, leaves_rows_out=leaves_rows_out)
    assert served(load(is_constrained=True), limits, depth) == ([12] * 6, 0)


@pytest.mark.parametrize("whole_prompts", [False, True])
def test_embeddings_of_a_model_with_a_pooler_are_served(whole_prompts: bool) -> None:
    history, limits = load(is_constrained=False), Limits(8, 64, 64, 64, 4, pools_only=True, whole_prompts=whole_prompts)
    for request in history.requests:
        message = replace(request.message, params=SamplingParams(1, temperature=0.0), pooling=Pooling.MODEL)
        request.message, request.length = message, message.num_prompt_tokens
    assert served(history, limits, hidden_size=4) == ([0] * 6, 0)


def test_requests_with_images_are_served() -> None:
    history = load(is_constrained=False)
    for request in history.requests:
        request.message = replace(request.message, media=Media([MediaItem(2, 4, "")]))
    assert served(history, Limits(8, 64, 64, 64, 4, encoder_budget=64)) == ([12] * 6, 0)


def test_requests_that_are_longer_than_the_context_are_counted_and_left_out() -> None:
    assert served(load(is_constrained=False), Limits(8, 64, 22, 64, 4)) == ([12] * 3, 3)


LIMITS = Limits(16, 96, 256, 512, 4)
COSTS = np.array((1e-3, 2e-5, 1e-4, 1e-7, 0.0, 0.0))
BESIDE = HostCost(np.array((4e-4, 3e-5, 5e-5)), np.array((3e-4, 1e-5, 0.0)), 1e-4)


def known_device(shared: float, factor: float = 1.0) -> ModelledDevice:
    cost = StepCost(COSTS, 0.0, MIN_STEPS, np.ones(6, np.bool_), shared)
    return ModelledDevice(cost.scaled(factor), BESIDE.scaled(factor), None)


def arrivals(count: int) -> History:
    """Requests of 20 to 100 tokens that do not wait for one another."""
    rng, at, requests = np.random.default_rng(1), 0.0, []
    for number in range(count):
        at += float(rng.exponential(0.02))
        length = int(rng.integers(20, 60)) + (output := int(rng.integers(4, 40)))
        tokens = rng.integers(0, 64, length).astype(np.int32)
        message = generate(tokens[:-output], number, max_tokens=output)
        requests.append(RecordedRequest(at, 1, message, tokens, len(tokens)))
    return History(requests)


def serve(
    config: SchedulerConfig, device: ModelledDevice, directory: Path | None = None, has_tokens: bool = True
) -> Measurements:
    """Serve `arrivals` by known costs. `directory`: the run is recorded there, with or without tokens."""
    head = replace(header(LIMITS, config), has_tokens=has_tokens)
    what_if = WhatIf(head, config, limits_for(head, config), arrivals(120), device)
    if directory is None:
        return what_if.run()
    recorder = FlightRecorder(head, SegmentWriter(directory, lambda _: head, 1 << 30))
    what_if.core.observers.add(recorder)
    try:
        return what_if.run()
    finally:
        recorder.close()


SETTINGS = {"batch_queue_depth": 2, "max_num_seqs": 16, "max_num_batched_tokens": 96, "max_model_len": 256}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[float, EventRecording]:
    """Recordings by what the scheduler's work takes from the device."""
    directories = {shared: tmp_path_factory.mktemp("recording") for shared in (0.0, 0.5)}
    for shared, directory in directories.items():
        serve(SchedulerConfig.model_validate(SETTINGS), known_device(shared), directory)
    return {shared: EventRecording(directory) for shared, directory in directories.items()}


@pytest.fixture(scope="module")
def models(recordings: dict[float, EventRecording]) -> dict[float, FittedModel]:
    return {shared: FittedModel(each.header, History.read(each)) for shared, each in recordings.items()}


@pytest.mark.parametrize(
    ("change", "shared"),
    [({"batch_queue_depth": 1}, 0.5), ({"max_num_batched_tokens": 32}, 0.0), ({"max_num_seqs": 4}, 0.5)],
)
def test_a_recording_with_known_costs_is_predicted_exactly(
    change: dict[str, int], shared: float, models: dict[float, FittedModel]
) -> None:
    """The device, the scheduler beside it, the way between them, and what they take from one another."""
    changed = SchedulerConfig.model_validate({**SETTINGS, **change})
    predicted, ranges = models[shared].predict(changed, None)
    truth = [figure.value for figure in serve(changed, known_device(shared)).figures()]
    assert [figure.value for figure in predicted.figures()] == pytest.approx(truth, rel=0.02)
    assert all(side.low <= side.value <= side.high for side in ranges)


def test_a_recording_without_tokens_gives_each_request_all_of_its_tokens_and_blocks(tmp_path: Path) -> None:
    """None of these ends it, also not behind its last full block."""
    serve(SchedulerConfig.model_validate(SETTINGS), known_device(0.0), tmp_path, has_tokens=False)
    requests = History.read(EventRecording(tmp_path)).requests
    assert [request.length for request in requests] == [request.length for request in arrivals(120).requests]
    assert all((len(r.tokens), len(r.blocks)) == (r.length, r.length // LIMITS.block_size) for r in requests)


@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_malformed_request_is_left_out(has_tokens: bool, tmp_path: Path) -> None:
    head = replace(header(LIMITS, SchedulerConfig()), has_tokens=has_tokens)
    recorder = FlightRecorder(head, SegmentWriter(tmp_path, lambda _: head, 1 << 30))
    message = generate([1, 2], 0)
    recorder.observe(RequestArrived(1, replace(message, token_ids=message.token_ids[:-1])))
    recorder.observe(RequestArrived(1, message))
    recorder.observe(TimeAdvanced(0.0))  # the last turn may be incomplete
    recorder.close()
    assert [request.length for request in History.read(EventRecording(tmp_path)).requests] == [2]


def test_a_figure_that_hangs_on_a_few_per_cent_is_not_predicted(models: dict[float, FittedModel]) -> None:
    """With that few sequences the queue grows or does not, according to times that no recording tells so exactly."""
    _, ranges = models[0.0].predict(SchedulerConfig.model_validate({**SETTINGS, "max_num_seqs": 2}), None)
    throughput, first, *_ = ranges
    assert throughput.is_known
    assert not first.is_known


def test_a_recording_that_the_model_cannot_give_is_not_used(recordings: dict[float, EventRecording]) -> None:
    """Its tokens came four times as late as its steps and the scheduler's work explain."""
    history = History.read(recordings[0.0])
    del history.requests[12:]
    for request in history.requests:
        request.ended += 3 * (request.ended - request.first_token)
    with pytest.raises(ValueError, match="other work ran beside it, so that nothing can be predicted"):
        FittedModel(recordings[0.0].header, history)


def test_a_range_is_known_up_to_a_factor_and_without_requests() -> None:
    assert [Range(2.0, 2.0, high).is_known for high in (2.6, 2.8, float("nan"))] == [True, False, True]
