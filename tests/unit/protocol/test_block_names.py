from hashlib import sha256

import numpy as np

from protocol.block_names import extend_names


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
