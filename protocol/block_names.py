"""Names of KV blocks: hashes that chain over every token before them, starting with the request's salt. Equal names
mean equal prefixes under the same salt."""

from hashlib import sha256

TOKEN_BYTES = 4
"""Tokens are int32, little-endian."""


def extend_names(names: list[bytes], salt: str, tokens: bytes, block_size: int) -> None:
    """Append the names of the full blocks that follow those of `names`.

    Args:
        names: SHA-256 digests of the first blocks of a sequence, in order.
        tokens: int32[...]: the tokens behind these blocks.
        block_size: tokens per block.
    """
    width = block_size * TOKEN_BYTES
    parent = names[-1] if names else sha256(salt.encode()).digest()
    for at in range(0, len(tokens) - width + 1, width):
        parent = sha256(parent + tokens[at : at + width]).digest()
        names.append(parent)
