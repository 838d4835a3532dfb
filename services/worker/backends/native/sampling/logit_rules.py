"""The logit rule of a request, from its parameters."""

import numpy as np
from numpy.typing import NDArray

from protocol.codec import unpack
from services.worker.backends.native.kernels.interface.logit_rules import LogitRule
from services.worker.batch.slots import BatchColumns

I32 = NDArray[np.int32]


def rule_of_slot(table: BatchColumns, slot: int, vocab_size: int) -> LogitRule | None:
    """None where the parameters change no logits. Ids outside the vocabulary have no effect."""
    if not (table.penalized[slot] or table.edited[slot] or table.banned[slot]):
        return None
    params = table.params[slot]
    biases = [(token, bias) for token, bias in params.logit_bias if token < vocab_size]
    allowed = params.allowed_token_ids
    return LogitRule(
        num_prompt=int(table.num_prompt[slot]),
        allowed=np.unique(_inside(unpack(allowed), vocab_size)) if allowed else None,
        bad_words=tuple(np.array(word, np.int32) for word in params.bad_words if word[-1] < vocab_size),
        banned=_inside(np.array(table.banned[slot], np.int32), vocab_size) if table.banned[slot] else None,
        banned_until=int(table.banned_until[slot]),
        biased=np.array([token for token, _ in biases], np.int32) if biases else None,
        biases=np.array([bias for _, bias in biases], np.float32) if biases else None,
        penalizes=bool(table.penalized[slot]),
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
    )


def _inside(tokens: I32, vocab_size: int) -> I32:
    return tokens[(tokens >= 0) & (tokens < vocab_size)]
