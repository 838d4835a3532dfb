"""The number of engines for what the running ones report."""

from services.ray.scaling import wanted


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
