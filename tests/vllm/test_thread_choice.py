"""The number of threads of a step follows its measured times. The times are made up here, so that they are exact."""

from collections.abc import Callable

import pytest

from services.worker.backends.vllm.thread_choice import TRIAL_SHARE, ThreadChoice, numbers_to_try

Times = Callable[[int, int], float]
"""Seconds of a step, from tokens and threads."""


def run(choice: ThreadChoice, steps: int, tokens: int, seconds: Times) -> list[int]:
    """Return the number of threads of each of these steps."""
    numbers = []
    for _ in range(steps):
        numbers.append(choice.choose(tokens))
        choice.record(seconds(tokens, numbers[-1]))
    return numbers


def barriers(tokens: int, threads: int) -> float:
    """Work that is shared, and barriers that cost more with each thread."""
    return 1e-4 * tokens / threads + 1e-3 * threads


def one_busy_core(tokens: int, threads: int) -> float:
    return barriers(tokens, threads) * (10 if threads == 4 else 1)


@pytest.mark.parametrize(("tokens", "best"), [(1, 1), (16, 1), (48, 2), (64, 2), (256, 4)])
def test_each_size_of_step_finds_its_fastest_number(tokens: int, best: int) -> None:
    choice = ThreadChoice((1, 2, 4))
    run(choice, 500, tokens, barriers)
    numbers = run(choice, 500, tokens, barriers)
    assert numbers.count(best) > 0.85 * len(numbers)
    assert choice.choose(100_000) == 4, "another size has its own times"


def test_sizes_begin_with_the_number_that_was_fastest_before_serving() -> None:
    """No number of tokens is computed with two numbers of threads: products would keep the first one."""
    choice, used = ThreadChoice((1, 2, 4)), dict[int, set[int]]()

    def step(tokens: int, threads: int) -> float:
        used.setdefault(tokens, set()).add(threads)
        return barriers(tokens, threads)

    choice.begin(step, most=100)
    assert all(len(numbers) == 1 for numbers in used.values())
    assert max(used) <= 100
    assert [choice.choose(tokens) for tokens in (1, 2, 8, 48, 100, 1000)] == [1, 1, 1, 2, 4, 4]


def test_large_steps_are_not_measured_before_serving() -> None:
    steps = list[tuple[int, int]]()
    choice = ThreadChoice((1, 2))
    choice.begin(lambda *step: steps.append(step) or 0.05, most=100)
    assert len(steps) == 1
    assert choice.choose(1) == 2


def test_a_neighbour_that_comes_and_goes_changes_the_number() -> None:
    choice = ThreadChoice((1, 2, 4))
    for seconds, best in ((barriers, 4), (one_busy_core, 2), (barriers, 4)):
        run(choice, 3000, 256, seconds)
        numbers = run(choice, 200, 256, seconds)
        assert numbers.count(best) > 0.85 * len(numbers)


def test_trials_cost_a_bounded_share_of_the_time() -> None:
    choice, steps = ThreadChoice((1, 2, 4)), 20_000
    numbers = run(choice, steps, 256, one_busy_core)
    spent = sum(one_busy_core(256, number) for number in numbers)
    assert numbers.count(4) > 10, "it is tried again and again"
    assert spent < (1 + 2 * TRIAL_SHARE) * steps * one_busy_core(256, 2)


def test_one_number_is_never_replaced() -> None:
    assert set(run(ThreadChoice((3,)), 100, 1, barriers)) == {3}


@pytest.mark.parametrize(("cores", "numbers"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_powers_of_two_and_all_cores_are_tried(cores: int, numbers: list[int]) -> None:
    assert numbers_to_try(cores) == numbers
