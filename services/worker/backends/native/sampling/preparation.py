"""Every operation of sampling once, before the first step: a device compiles its kernels when they first run."""

import numpy as np
import torch

from services.worker.kernels.interface.kernels import Kernels
from services.worker.kernels.interface.logit_rules import LogitRule, LogitRules
from services.worker.kernels.interface.sampling import DrawColumns

_TOKEN, _ROW, _POSITION = (np.full(1, value, np.int32) for value in (0, 0, 1))
_RULE = LogitRule(
    num_prompt=0,
    allowed=_TOKEN,
    bad_words=(_TOKEN,),
    banned=_TOKEN,
    banned_until=2,
    biased=_TOKEN,
    biases=np.ones(1, np.float32),
    penalizes=True,
    repetition=1.1,
)
_FILTERS = ((0.0, 0, 1.0), (0.1, 1, 0.9))
"""min_p, top_k and top_p: none, and all."""


def run_every_operation(kernels: Kernels, rules: LogitRules, history: torch.Tensor, vocab_size: int) -> None:
    """Sample a row of slot 0, which has no request and no rule afterwards.

    Args:
        history: int32[slots, limit]; one token of the slot is written
    """
    sampling, logits = kernels.sampling, torch.zeros(1, vocab_size, device=kernels.device.where)
    kernels.rows.write_prompt(history, 0, _TOKEN)
    rules.assign(0, _RULE)
    rules.apply(logits, _ROW, _POSITION)
    rules.assign(0, None)
    sampling.apply_bitmask(logits, _ROW, np.full((1, -(-vocab_size // 32)), -1, np.int32))
    ids = sampling.greedy(logits)
    for min_p, top_k, top_p in _FILTERS:
        temperature, least, share = (np.full(1, value, np.float32) for value in (1.0, min_p, top_p))
        columns = temperature, least, np.full(1, top_k, np.int32), share, np.zeros(1, np.uint64), _POSITION
        sampling.choose(logits, DrawColumns(*columns))
    sampling.logprobs(logits, _ROW, ids, np.ones(1, np.int32))
