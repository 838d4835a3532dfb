"""Results of steps, as messages and decoded."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from protocol.codec import pack, unpack
from protocol.steps import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.results import DecodedResult
from services.scheduler.core.slots import Column


def result_of(plan: SchedulerOutput, tokens: int | Sequence[int] = 7, **fields: Any) -> ModelRunnerOutput:
    """Return a result with these tokens, or the same one for every sampling row, and with these fields."""
    rows = np.frombuffer(plan.samples, np.bool_)
    slots, generations = unpack(plan.slots)[rows], unpack(plan.generations)[rows]
    one_each: dict[str, Any] = {
        "slots": pack(slots),
        "generations": pack(generations),
        "counts": pack(np.ones(len(slots), np.int32)),
        "token_ids": pack(np.full(len(slots), tokens, np.int32)),
    }
    return ModelRunnerOutput(plan.epoch, plan.step_id, **(one_each | fields))


def one_token_each(token_ids: Column) -> DecodedResult:
    """Return a result with one token for every row and no drafts."""
    return DecodedResult(np.ones(len(token_ids), np.int32), token_ids, np.zeros(len(token_ids), np.int32))
