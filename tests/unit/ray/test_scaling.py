"""The number of engines for what the running ones report."""

from types import SimpleNamespace

import pytest

from services.ray.scaling import QueueSeconds, wanted


def test_queues_over_the_target_want_more_engines() -> None:
    assert wanted([5.0], [1.0], target=2.0) == 2, "at most twice as many"
    assert wanted([3.0, 3.0, 3.0, 3.0], [1.0] * 4, target=2.0) == 6
    assert wanted([2.1, 9.0], [1.0, 1.0], target=2.0) == 4


def test_one_engine_with_a_short_queue_is_enough_for_new_requests() -> None:
    assert wanted([0.1, 30.0], [1.0, 1.0], target=2.0) == 2


def test_engines_that_the_others_can_replace_are_too_many() -> None:
    assert wanted([0.0, 0.0, 0.0], [0.1, 0.2, 0.1], target=2.0) == 2
    assert wanted([0.0], [0.0], target=2.0) == 1
    assert wanted([0.0, 0.0], [0.5, 0.5], target=2.0) == 2, "each is half busy"
    assert wanted([1.5, 0.0], [0.1, 0.1], target=2.0) == 2, "not far below the target"


@pytest.mark.parametrize(
    ("waits", "busy", "number"),
    [
        ({}, {}, 3),
        ({"a": 0.0, "b": 0.0}, {"a": 0.1, "b": 0.1}, 1),
        ({"a": 0.0, "b": 0.0}, {"a": 0.9, "b": 0.1}, 3),
        ({"a": 0.0, "b": 0.0, "c": 0.0}, {"a": 0.1, "b": 0.1}, 2),
        ({"a": 0.0, "b": 0.0, "c": 0.0}, {}, 3),
    ],
)
def test_engines_that_have_not_reported_are_no_reason_for_fewer(
    waits: dict[str, float], busy: dict[str, float], number: int
) -> None:
    """Three engines run. Without a report of its use, an engine counts as busy."""
    metrics = {"expected_queue_seconds": waits, "busy": busy}
    context = SimpleNamespace(aggregated_metrics=metrics, running_replicas=["a", "b", "c"], target_num_replicas=3)
    assert QueueSeconds(2.0)(context) == (number, {})  # type: ignore[arg-type]
