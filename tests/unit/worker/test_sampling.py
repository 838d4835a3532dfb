"""The reference sampler, row by row."""

import numpy as np
import pytest

from protocol.codec import pack
from protocol.sampling import SamplingParams
from services.worker.sampling.reference import (
    adjusted,
    apply_bitmask,
    forbid,
    log_softmax,
    logprobs_of,
    restrict,
    sample,
    sample_row,
)

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))


def sampled(logits: np.ndarray, position: int = 0, **values: float) -> int:
    draw = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0, "seed": 1} | values
    return sample_row(logits, position=position, **draw)  # type: ignore[arg-type]


def kept(logits: np.ndarray) -> list[int]:
    return np.flatnonzero(np.isfinite(logits)).tolist()


def draw(count: int = 400, **values: float) -> set[int]:
    return {sampled(LOGITS, position, **values) for position in range(count)}


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    assert sampled(np.array([1, 3, 3, 0], np.float32), temperature=0.0) == 1


def test_parameters_bind_the_draw() -> None:
    assert draw() == {0, 1, 2, 3}
    assert draw(top_k=2) == {0, 1}
    assert draw(temperature=0.05) == draw(temperature=0.0) == {0}


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


def test_seed_and_position_decide() -> None:
    def once(seed: int, position: int) -> int:
        return sampled(LOGITS, position, seed=seed)

    first = [once(5, position) for position in range(50)]
    assert first == [once(5, position) for position in range(50)]
    assert first != [once(6, position) for position in range(50)]


def test_forbidden_tokens_and_bitmasks() -> None:
    logits = LOGITS.copy()
    forbid(logits, (0, 99))
    assert kept(logits) == [1, 2, 3]
    apply_bitmask(logits, np.array([0b1010], np.int32))
    assert kept(logits) == [1, 3]


# -- changes to the logits ---------------------------------------------------------------------------------------

NOTHING = np.empty(0, np.int32)


def requested(**values: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 9, "temperature": 0.0} | values)  # type: ignore[arg-type]


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def bits(*tokens: int, vocab: int = 4) -> np.ndarray:
    mask = np.zeros(-(-vocab // 32), np.int32)
    for token in tokens:
        mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
    return mask


def test_default_parameters_do_not_change_the_logits() -> None:
    row = adjusted(LOGITS, requested(), ids(0, 1), ids(2, 2))
    assert row.tobytes() == LOGITS.tobytes()
    assert row is not LOGITS


def penalized(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """Apply the penalties token by token, as the parameters are documented."""
    row = []
    for token, value in enumerate(map(np.float32, logits)):
        if token in prompt + output:
            rate = np.float32(params.repetition_penalty)
            value = value / rate if value > 0 else value * rate
        value -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
        value -= np.float32(params.presence_penalty) * np.float32(token in output)
        row.append(float(value))
    return row


@pytest.mark.parametrize("seed", range(20))
def test_penalties_are_applied_as_documented(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, 40).astype(np.float32)
    prompt, output = rng.integers(0, 40, 12).astype(np.int32), rng.integers(0, 20, 30).astype(np.int32)
    params = requested(
        presence_penalty=float(rng.uniform(-2, 2)),
        frequency_penalty=float(rng.uniform(-2, 2)),
        repetition_penalty=float(rng.uniform(0.1, 5)),
    )
    row = adjusted(logits, params, prompt, output)
    assert row.tolist() == penalized(logits.tolist(), params, prompt.tolist(), output.tolist())
    assert row.dtype == np.float32


def test_a_bias_is_added_and_only_allowed_tokens_remain() -> None:
    assert sample(LOGITS, requested(), NOTHING, NOTHING) == 0
    assert sample(LOGITS, requested(logit_bias=((3, 5.0), (99, 50.0))), NOTHING, NOTHING) == 3
    assert kept(adjusted(LOGITS, requested(allowed_token_ids=pack([1, 3, 99])), NOTHING, NOTHING)) == [1, 3]


def test_a_bias_does_not_allow_a_forbidden_token() -> None:
    params = requested(allowed_token_ids=pack([1, 2]), bad_words=((2,),), logit_bias=((0, 9.0), (2, 9.0)))
    assert kept(adjusted(LOGITS, params, NOTHING, NOTHING)) == [1]


@pytest.mark.parametrize(
    ("output", "forbidden"),
    [([], [3]), ([1], [3]), ([1, 2], [0, 3]), ([2, 1, 2], [0, 3]), ([1, 2, 2], [3]), ([0], [1, 3]), ([2], [3])],
)
def test_the_end_of_a_bad_word_is_forbidden_after_its_beginning(output: list[int], forbidden: list[int]) -> None:
    params = requested(bad_words=((3,), (1, 2, 0), (0, 1), (99,)))
    left = kept(adjusted(LOGITS, params, ids(1, 2), ids(*output)))
    assert left == [token for token in range(4) if token not in forbidden]


def test_stop_tokens_are_forbidden_below_min_tokens() -> None:
    params = requested(min_tokens=2, eos_token_ids=(0,), stop_token_ids=(2,))
    assert kept(adjusted(LOGITS, params, ids(0), ids(1))) == [1, 3]
    assert kept(adjusted(LOGITS, params, ids(0), ids(1, 1))) == [0, 1, 2, 3]


def test_a_grammar_wins_if_other_parameters_forbid_all_its_tokens() -> None:
    params = requested(allowed_token_ids=pack([0, 1]), bad_words=((2,),))
    assert kept(adjusted(LOGITS, params, NOTHING, NOTHING, bits(1, 2))) == [1]
    for temperature in (0.0, 1.0):
        alone = requested(allowed_token_ids=pack([0, 1]), temperature=temperature)
        assert sample(LOGITS, alone, NOTHING, NOTHING, bits(3, 2)) == 2, "the lowest id that the grammar allows"


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_parameters_that_forbid_every_token_yield_id_0(temperature: float) -> None:
    params = requested(allowed_token_ids=pack([2]), bad_words=((2,),), temperature=temperature, top_p=0.5, min_p=0.1)
    assert sample(LOGITS, params, NOTHING, NOTHING) == 0


# -- log-probabilities -------------------------------------------------------------------------------------------


def test_logprobs_begin_with_the_token_itself() -> None:
    token_rank, token_ids, values = logprobs_of(LOGITS, 2, 2)
    assert (token_rank, token_ids.tolist()) == (3, [2, 0, 1])
    assert values.dtype == np.float32
    assert np.exp(values) == pytest.approx([0.2, 0.4, 0.3])


def test_equal_logits_share_a_token_rank_and_are_in_order_of_their_ids() -> None:
    logits = np.array([1, 3, 2, 3, 2, 2], np.float32)
    assert logprobs_of(logits, 3, 4).token_rank == 1
    assert logprobs_of(logits, 5, 4).token_rank == 3
    assert logprobs_of(logits, 5, 4).token_ids.tolist() == [5, 1, 3, 2, 4]


def test_number_of_alternatives() -> None:
    assert logprobs_of(LOGITS, 1, 9).token_ids.tolist() == [1, 0, 1, 2, 3]
    assert logprobs_of(LOGITS, 1, 0).token_ids.tolist() == [1]


def test_log_softmax_against_float64() -> None:
    logits = np.random.default_rng(1).normal(0, 8, 1000).astype(np.float32)
    exact = logits - np.float64(logits.max()) - np.log(np.exp(logits.astype(np.float64) - logits.max()).sum())
    assert log_softmax(logits) == pytest.approx(exact, rel=1e-6)
    assert log_softmax(np.array([1000, -1000, -np.inf], np.float32)).tolist() == [0, -2000, -np.inf]
