"""The index of what engines hold, beside a model that keeps everything."""

import pickle
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import block_names
from protocol.codec import pack
from services.frontend.placement.block_index import BlockIndex
from services.frontend.placement.prefix_names import SEGMENT_TOKENS, PrefixNames
from tests.unit.frontend.placement.world import names_of, prompt

NAMES = [number.to_bytes(2, "little") for number in range(40)]
ENGINES = st.integers(0, 20)
RUNS = st.integers(0, 20).flatmap(lambda first: st.integers(0, 20).map(lambda n: NAMES[first : first + n]))


def held(index: BlockIndex, names: list[bytes]) -> dict[int, int]:
    return {engine: count for count, engines in index.holders(names) for engine in engines.tolist()}


@given(st.lists(st.tuples(st.sampled_from(("add", "remove", "clear")), ENGINES, RUNS)), RUNS)
def test_a_large_index_has_what_engines_hold(changes: list[tuple[str, int, list[bytes]]], names: list[bytes]) -> None:
    index, model = BlockIndex(1000), defaultdict[int, set[bytes]](set)
    for change, engine, run in changes:
        if change == "add":
            index.add(engine, run)
            model[engine].update(run)
        elif change == "remove":
            index.remove(engine, run)
            model[engine].difference_update(run)
        else:
            index.clear(engine)
            model[engine].clear()
    expected = {}
    for engine, blocks in model.items():
        count = next((at for at, name in enumerate(names) if name not in blocks), len(names))
        if count:
            expected[engine] = count
    assert held(index, names) == expected


@given(st.lists(st.tuples(ENGINES, RUNS, st.booleans()), max_size=60))
def test_a_small_index_forgets_but_invents_nothing(changes: list[tuple[int, list[bytes], bool]]) -> None:
    size = 8
    index, model = BlockIndex(size), defaultdict[int, set[bytes]](set)
    for engine, run, is_cleared in changes:
        if is_cleared:
            index.clear(engine)
            model[engine].clear()
        index.add(engine, run)
        model[engine].update(run)
        assert index.num_stored <= 2 * (size + 20)  # an event adds 20 names
        found = held(index, run)
        assert found.get(engine, 0) == len(run)
        assert all(set(run[:count]) <= model[other] for other, count in found.items())


def test_names_in_use_outlive_any_number_of_others() -> None:
    index = BlockIndex(100)
    index.add(0, NAMES[:5])
    for number in range(5000):
        index.add(1, [b"other %d" % number])
        if number % 50 == 0:
            assert held(index, NAMES[:5]) == {0: 5}
    assert index.num_stored <= 202


def test_engines_that_are_cleared_again_and_again_take_no_memory() -> None:
    index = BlockIndex(1000)
    for number in range(5000):
        index.add(number % 3, NAMES[:5])
        index.clear(number % 3)
    assert held(index, NAMES[:5]) == {}
    index.add(7, NAMES[:5])
    assert len(pickle.dumps(index)) < 1000


@pytest.mark.parametrize("num_tokens", [0, 3, 4, 127, 128, 129, 255, 256, 257, 1000])
@pytest.mark.parametrize("block_size", [4, 16, 128, 200])
def test_names_of_prefixes_are_those_of_blocks(num_tokens: int, block_size: int) -> None:
    tokens = pack(list(range(num_tokens)))
    blocks = block_names.names_of("salt", tokens, block_size)
    prefixes = PrefixNames(block_size, 100)
    prefixes.of(pack([9] * num_tokens), "salt")  # another prompt
    for _ in range(2):  # made, then found
        names = prefixes.of(tokens, "salt")
        lengths = [prefixes.num_tokens(count) for count in range(1, len(names) + 1)]
        assert names == [blocks[length // block_size - 1] for length in lengths]
    assert not blocks or num_tokens - lengths[-1] < max(SEGMENT_TOKENS, block_size)


@given(st.text(), st.text())
def test_no_name_of_one_salt_is_a_name_of_another(one: str, other: str) -> None:
    prefixes, tokens = PrefixNames(4, 100), prompt((3, 300))
    found = [set(prefixes.of(tokens, salt)) for salt in (one, other)]
    assert found[0].isdisjoint(found[1]) is (one != other)
    assert found[0] <= set(names_of(tokens, one))
