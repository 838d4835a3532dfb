"""Shapes of a rigid device, against worked examples and brute force."""

from itertools import pairwise
from random import Random

import numpy as np
import pytest

from services.scheduler.policies.geometry import Geometry
from tests.simulation.rigid import rectangle, windows

SMALL = Geometry(4, 8)
GEOMETRIES = [SMALL, Geometry(64, 256), Geometry(64, 512), Geometry(16, 16)]


def ends(geometry: Geometry, tokens: int, at: int = 0) -> list[int]:
    found = []
    while at < tokens:
        at = geometry.chunk_end(tokens, at)
        found.append(at)
    return found


def chunks(geometry: Geometry, tokens: int) -> list[int]:
    return [end - start for start, end in pairwise([0, *ends(geometry, tokens)])]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_prompts_of_up_to_three_chunks(geometry: Geometry) -> None:
    block, chunk = geometry.block, geometry.chunk
    for tokens in range(1, 3 * chunk + 1):
        lengths, padding = chunks(geometry, tokens), geometry.left_padding(tokens)
        assert len(lengths) == -(-tokens // chunk)
        assert padding == len(lengths) * chunk - -(-tokens // block) * block
        assert 0 <= padding < chunk
        assert padding % block == 0
        assert lengths[0] == min(chunk - padding, tokens)
        assert all(length == chunk for length in lengths[1:-1])
        assert sum(lengths) == tokens
        assert [(end - n, end) for n, end in zip(lengths, ends(geometry, tokens), strict=True)] == windows(
            tokens, block, chunk
        )


@pytest.mark.parametrize("geometry", GEOMETRIES[:3])
def test_of_a_prefix_hit_whole_chunks_are_used_and_never_the_last(geometry: Geometry) -> None:
    block, chunk = geometry.block, geometry.chunk
    for tokens in range(1, 3 * chunk + 1, 1 if geometry is SMALL else 7):
        begins = [first for first, _ in windows(tokens, block, chunk)]
        for hit in range(0, tokens, block):
            usable = geometry.usable_prefix(tokens, hit)
            assert usable == max(first for first in begins if first <= hit)
            rule = max(0, (geometry.left_padding(tokens) + hit) // chunk * chunk - geometry.left_padding(tokens))
            assert usable == min(rule, begins[-1])
            assert ends(geometry, tokens, usable)[-1] == tokens


def test_a_chunk_that_was_cut_short_goes_on_to_its_end() -> None:
    assert ends(SMALL, 13, at=3) == [8, 13]
    assert ends(SMALL, 10, at=5) == [10]


def test_tkv_is_the_longest_row_of_the_rectangle() -> None:
    rng = Random(0)
    for _ in range(2000):
        lengths = [rng.randint(1, 40) for _ in range(rng.randint(1, 6))]
        assert SMALL.tkv(np.array(lengths, np.int32)) == rectangle(lengths, 4)
    # The shorter row ends with a full block and is padded by a block
    assert SMALL.tkv(np.array([5, 4], np.int32)) == 8
    assert SMALL.tkv(np.array([5, 5], np.int32)) == 5


def test_the_rows_that_fit_are_taken_in_turn() -> None:
    rng = Random(1)
    cut = 0
    for _ in range(2000):
        lengths = [rng.randint(1, 40) for _ in range(rng.randint(1, 6))]
        rows, tkv, volume = rng.randint(1, 6), rng.randint(40, 60), rng.randint(44, 200)
        chosen: list[int] = []
        for row in range(len(lengths)):
            taken = [lengths[i] for i in [*chosen, row]]
            longest = rectangle(taken, 4)
            if len(taken) <= rows and longest <= tkv and len(taken) * longest <= volume:
                chosen.append(row)
        found = SMALL.fitting(np.array(lengths, np.int32), rows, tkv, volume).tolist()
        cut += len(found) < len(lengths)
        assert found == chosen
    assert cut > 200


def brute_force(newcomer: int, decoders: list[int]) -> int:
    """Return the largest volume over all later lengths; a row that ends later than a length is in that step."""
    everybody = [newcomer, *decoders]
    return max(sum(end >= length for end in everybody) * length for length in range(1, newcomer + 1))


def test_the_projected_peak_is_that_of_brute_force() -> None:
    """Up to the end of the new request: later steps were checked before."""
    rng = Random(2)
    for _ in range(2000):
        newcomer, decoders = rng.randint(1, 60), [rng.randint(1, 60) for _ in range(rng.randint(0, 6))]
        assert Geometry.peak_volume(newcomer, decoders) == brute_force(newcomer, decoders)
