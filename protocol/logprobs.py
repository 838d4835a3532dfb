"""Log-probabilities of some tokens, as columns; the same on both ways that they take."""

import msgspec


class Logprobs(msgspec.Struct, array_like=True, frozen=True):
    """Per token one row, and per row one entry for the token itself, then one for each of the most likely ones, the
    most likely first; the token itself may be among them again. `protocol.rows.LogprobRows` has them as arrays."""

    owners: bytes
    """int32[rows]: whose token: slots in a step's result, uint32 request numbers on the way to a frontend"""
    positions: bytes
    """int32[rows]: which token of the request's sequence, counted from the first of the prompt"""
    counts: bytes
    """int32[rows]: entries, at least 1"""
    ranks: bytes
    """int32[rows]: of the token itself; 1 is the most likely"""
    token_ids: bytes
    """int32[sum(counts)]"""
    values: bytes
    """float32[sum(counts)], natural logarithms; minus infinity is possible, NaN is not"""
