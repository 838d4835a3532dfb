from hashlib import sha256

import numpy as np
import pytest

from protocol.block_names import NAME_BYTES, NamedBlocks, extend_names, split_names
from protocol.codec import ProtocolError, pack
from protocol.media import MediaItem, contents


def names_of(tokens: list[int], salt: str = "", block_size: int = 4) -> list[bytes]:
    names: list[bytes] = []
    extend_names(names, salt, np.array(tokens, np.int32).tobytes(), block_size)
    return names


def test_a_name_chains_over_the_salt_and_every_token_before():
    tokens = np.arange(8, dtype=np.int32)
    first = sha256(sha256(b"tenant").digest() + tokens[:4].tobytes()).digest()
    second = sha256(first + tokens[4:].tobytes()).digest()
    assert names_of(tokens.tolist(), "tenant") == [first, second]
    assert not set(names_of(tokens.tolist(), "other")) & {first, second}


def test_a_partial_block_has_no_name_until_it_is_full():
    names = names_of([1, 2, 3, 4, 5, 6])
    assert len(names) == 1
    extend_names(names, "", np.array([5, 6, 7, 8], np.int32).tobytes(), 4)
    assert names == names_of([1, 2, 3, 4, 5, 6, 7, 8])


def test_a_column_that_is_no_names_of_blocks_is_refused():
    with pytest.raises(ProtocolError, match="no names"):
        split_names(bytes(NAME_BYTES + 1))
    for num_names in (1, 3):
        with pytest.raises(ProtocolError, match=f"2 blocks have {num_names} names"):
            NamedBlocks(pack([0, 1]), bytes(num_names * NAME_BYTES)).pairs()


def test_a_block_of_a_file_is_named_by_the_file_and_its_place():
    """Equal tokens may be those of any file, or text."""
    items = [MediaItem(0, 6, "a"), MediaItem(2, 6, "a"), MediaItem(0, 5, "a"), MediaItem(0, 6, "b")]
    assert len({contents(each, 4, 8) for each in ([item] for item in items)} | {contents(items[:0], 4, 8)}) == 5
    assert contents(items, 6, 8) == contents([items[1]], 6, 8)
    assert contents(items[1:2], 0, 2) == b""
