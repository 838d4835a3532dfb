"""Log-probabilities of tokens as columns. Results of a step and outputs for a frontend use the same type."""

import msgspec


class Logprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities with one row per token. `protocol.rows.LogprobRows` holds the same columns as arrays.

    The first entry of a row is the token itself. The most likely tokens follow, the most likely first; the token itself
    may be one of them.
    """

    owners: bytes
    """int32[rows]: slots in a step's result; request numbers (uint32) in a message to a frontend"""
    positions: bytes
    """int32[rows]: position of the token in the request's sequence; the first prompt token is at 0"""
    counts: bytes
    """int32[rows]: number of entries, at least 1"""
    token_ranks: bytes
    """int32[rows]: position of the token itself in the vocabulary by likelihood; 1 is the most likely"""
    token_ids: bytes
    """int32[sum(counts)]"""
    values: bytes
    """float32[sum(counts)]: natural logarithms, or minus infinity; NaN where the model's logits overflowed"""
