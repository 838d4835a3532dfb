from hashlib import sha256

import numpy as np
import pytest

from protocol.block_names import NAME_BYTES, NamedBlocks, extend_names, names_of, split_names
from protocol.codec import ProtocolError, pack
from protocol.media import MediaItem, contents

TOKENS = np.arange(8, dtype=np.int32).tobytes()


def test_a_name_chains_over_the_salt_and_every_token_before():
    first = sha256(sha256(b"tenant").digest() + TOKENS[:16]).digest()
    second = sha256(first + TOKENS[16:]).digest()
    assert names_of("tenant", TOKENS, 4) == [first, second]
    assert not set(names_of("other", TOKENS, 4)) & {first, second}


def test_a_partial_block_has_no_name_until_it_is_full():
    names = names_of("", TOKENS[:24], 4)
    assert len(names) == 1
    extend_names(names, "", TOKENS[16:], 4)
    assert names == names_of("", TOKENS, 4)


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
