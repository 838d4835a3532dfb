"""Requests of a scheduler that a test drives step by step, and what it sends."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from protocol.codec import pack
from protocol.requests import Finish, GenerateRequest
from protocol.sampling import SamplingParams
from protocol.steps import SchedulerOutput
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.request import Request

_FIELDS = frozenset(GenerateRequest.__struct_fields__)


def generate(
    tokens: Sequence[int] = (1, 2, 3), number: int = 0, prompt: int | None = None, **fields: Any
) -> GenerateRequest:
    """Return a greedy request for four tokens. `prompt`: its length, if output tokens follow in `tokens`; `fields`:
    those of the message, and sampling parameters."""
    params = {name: fields.pop(name) for name in [*fields] if name not in _FIELDS}
    sampling = SamplingParams(**({"max_tokens": 4, "temperature": 0.0} | params))
    length = len(tokens) if prompt is None else prompt
    return GenerateRequest(number, pack(np.asarray(tokens, np.int32)), length, sampling, **fields)


def request(tokens: Sequence[int] = (1, 2, 3), number: int = 0, prompt: int | None = None, **params: Any) -> Request:
    """Return a request as the core keeps it. Its number is also its order key."""
    sampling = SamplingParams(**({"max_tokens": 4, "temperature": 0.0} | params))
    length = len(tokens) if prompt is None else prompt
    return Request(0, number, np.array(tokens, np.int32), length, sampling, number)


def plans(core: EngineCore) -> list[SchedulerOutput]:
    """Dispatch; return the steps among the messages."""
    return [message for message in core.dispatch() if isinstance(message, SchedulerOutput)]


def finishes(core: EngineCore) -> list[Finish]:
    return [finish for _, outputs in core.take_outputs() for finish in outputs.finished]
