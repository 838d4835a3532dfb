"""Stand-ins for the tokens of a recording without tokens.

The core reads tokens for two things only: whether one ends its request, and which prefixes are equal. So every token is
one that ends nothing, except the recorded stop tokens; and each block has its recorded id in place of its name, which
the core then does not compute.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from msgspec.structs import replace

from protocol.codec import pack, unpack
from protocol.requests import GenerateRequest
from protocol.sampling import SamplingParams
from services.scheduler.core.slots import Column
from services.scheduler.recording.prefix_chains import ID_BYTES
from services.scheduler.recording.records import ArrivalRecord, OutcomeRecord
from services.scheduler.recording.segments import RecordingError


def filler(params: SamplingParams, vocab_size: int) -> int:
    """Return a token that ends no request with these parameters. Raises: RecordingError, if there is none"""
    return _filler(params.eos_token_ids + params.stop_token_ids, vocab_size)


@cache
def _filler(ends: tuple[int, ...], vocab_size: int) -> int:
    if (token := next((token for token in range(vocab_size) if token not in ends), None)) is None:
        raise RecordingError(
            f"all {vocab_size} tokens of the vocabulary are stop tokens of a request; such a recording replays only "
            "with --record-tokens"
        )
    return token


def arrival(record: ArrivalRecord, vocab_size: int) -> GenerateRequest:
    """Return the request with tokens. Raises: RecordingError"""
    message = record.message
    if len(message.token_ids) % 4:
        return message
    tokens = np.full(record.num_tokens, filler(message.params, vocab_size), np.int32)
    tokens[: len(message.token_ids) // 4] = unpack(message.token_ids)
    return replace(message, token_ids=pack(tokens))


def outputs(counts: Column, fillers: Sequence[int], outcome: OutcomeRecord | None) -> Column:
    """Return the tokens of a result, row after row.

    Args:
        counts: int32[rows], tokens of each row.
        fillers: a token for each row.
        outcome: None: no token is appended to a request.
    """
    tokens = np.repeat(np.array(fillers, np.int32), counts)
    if outcome is not None and outcome.stop_rows:
        rows, positions, totals = map(unpack, (outcome.stop_rows, outcome.stop_positions, outcome.totals))
        firsts = np.cumsum(counts) - counts
        tokens[firsts[rows] + positions - totals[rows]] = unpack(outcome.stop_tokens)
    return tokens


def filled_blocks(outcome: OutcomeRecord) -> list[tuple[int, bytes]]:
    """Return the blocks that a result has filled, in order: the slot of each, and its name."""
    slots = unpack(outcome.slots)[unpack(outcome.block_rows)].tolist()
    return list(zip(slots, block_names(outcome.blocks), strict=True))


def block_names(ids: bytes) -> list[bytes]:
    return [ids[at : at + ID_BYTES] for at in range(0, len(ids), ID_BYTES)]
