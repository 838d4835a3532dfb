"""Everything that enters the placement core, and every decision that leaves it, as data.

A recording has names of blocks instead of tokens: it does not contain a text, but confirms a guess of one. It replays:
`replay` (services.frontend.placement.replay) passes the events to a new core.
"""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

P = ParamSpec("P")
R = TypeVar("R")
Input = Callable[Concatenate[Any, P], R]
Record = msgspec.Struct
"""An event, or one of `decisions`. A line of a recording has its kind, "type", and its fields."""
Recorder = Callable[[Record], None]
INPUTS: dict[type[Record], Callable[..., Any]] = {}
"""Method of `Placement` for each kind of event."""


class PlacementStarted(msgspec.Struct, frozen=True, tag="started"):
    """The first event."""

    policy: str
    seed: int
    max_blocks: int


def recorded(kind: str) -> Callable[[Input[P, R]], Input[P, R]]:
    """Decorate an input of the core. A call is recorded as an event, whose fields are the arguments, with their names
    also in the file; the decisions that it returns follow."""

    def decorate(method: Input[P, R]) -> Input[P, R]:
        _, *given = signature(method).parameters.values()
        fields = [(p.name, p.annotation, *([] if p.default is Parameter.empty else [p.default])) for p in given]
        event: Any = msgspec.defstruct(kind, fields, frozen=True, tag=kind)

        @wraps(method)
        def record(core: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if core.record is None:
                return method(core, *args, **kwargs)
            core.record(event(*args, **kwargs))
            found = method(core, *args, **kwargs)
            for decision in found if isinstance(found, list) else [found] if found is not None else []:
                core.record(decision)
            return found

        INPUTS[event] = record
        return record

    return decorate
