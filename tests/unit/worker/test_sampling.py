"""The reference sampler, row by row."""

import numpy as np
import pytest

from services.worker.sampling import RowParams, apply_bitmask, forbid, restrict, sample_row

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))


def params(position: int = 0, **values: float) -> RowParams:
    row = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 1} | values
    return RowParams(position=position, **row)  # type: ignore[arg-type]


def kept(logits: np.ndarray) -> list[int]:
    return np.flatnonzero(np.isfinite(logits)).tolist()


def draw(count: int = 400, **values: float) -> set[int]:
    return {sample_row(LOGITS, params(position, **values)) for position in range(count)}


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    assert sample_row(np.array([1, 3, 3, 0], np.float32), params(temperature=0.0)) == 1


def test_sampling_reaches_every_token_and_greedy_one() -> None:
    assert draw() == {0, 1, 2, 3}
    assert draw(temperature=0.0) == {0}


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "expected"),
    [
        (0, 1.0, 0.0, [0, 1, 2, 3]),
        (2, 1.0, 0.0, [0, 1]),
        (9, 1.0, 0.0, [0, 1, 2, 3]),
        (0, 0.39, 0.0, [0]),
        (0, 0.5, 0.0, [0, 1]),
        (0, 0.75, 0.0, [0, 1, 2]),
        (3, 0.5, 0.0, [0, 1]),
        (2, 0.6, 0.0, [0, 1]),
        (0, 1.0, 0.45, [0, 1, 2]),
        (0, 1.0, 0.7, [0, 1]),
        (0, 1.0, 1.0, [0]),
        (0, 0.0, 0.0, [0]),
    ],
)
def test_filters_keep_what_they_should(top_k: int, top_p: float, min_p: float, expected: list[int]) -> None:
    assert kept(restrict(LOGITS.copy(), top_k, top_p, min_p)) == expected


def test_ties_with_the_last_kept_token_stay() -> None:
    assert kept(restrict(np.array([2, 1, 1, 0], np.float32), 2, 1.0, 0.0)) == [0, 1, 2]


def test_filters_bind_the_draw() -> None:
    assert draw(top_k=2) == {0, 1}


def test_seed_and_position_decide() -> None:
    def once(seed: int, position: int) -> int:
        return sample_row(LOGITS, params(position, seed=seed))

    first = [once(5, position) for position in range(50)]
    assert first == [once(5, position) for position in range(50)]
    assert first != [once(6, position) for position in range(50)]


def test_a_low_temperature_sharpens() -> None:
    assert draw(temperature=0.05) == {0}


def test_forbidden_tokens_and_bitmasks() -> None:
    logits = LOGITS.copy()
    forbid(logits, (0, 99))
    assert kept(logits) == [1, 2, 3]
    apply_bitmask(logits, np.array([0b1010], np.int32))
    assert kept(logits) == [1, 3]
