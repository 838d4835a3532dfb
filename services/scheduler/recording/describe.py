"""Text of a difference between a recording and its replay, for people."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from protocol.codec import unpack
from protocol.epochs import number_of
from services.scheduler.core.observer import Decision
from services.scheduler.recording.replay import Difference

_BYTES = {"samples": np.uint8, "states": np.int8}
"""Columns of another type than int32."""
_LONGEST = 400
"""Characters of a value."""


def describe(difference: Difference) -> str:
    """Return lines with both sides: every field of the decisions, those that differ marked with `!`."""
    d = difference
    lines = [
        f"first difference: event {d.turn:,}, {d.now:.6f} s on the scheduler's clock",
        f"cause: {type(d.cause).__name__}",
        f"recorded: {_title(d.recorded)}",
        f"replayed: {_title(d.replayed)}",
    ]
    if isinstance(d.replayed, str) or d.recorded is None or d.replayed is None:
        for side in (d.recorded, d.replayed):
            lines += [] if side is None or isinstance(side, str) else [f"    {n} = {v}" for n, v in _fields(side)]
        return "\n".join(lines)
    left, right = dict(_fields(d.recorded)), dict(_fields(d.replayed))
    for name in {**left, **right}:
        one, other = left.get(name, "-"), right.get(name, "-")
        if one == other:
            lines.append(f"    {name} = {one}")
        else:
            lines += [f"  ! {name}", f"      recorded {one}", f"      replayed {other}"]
    return "\n".join(lines)


def _title(side: Decision | str | None) -> str:
    if side is None:
        return "no further decision"
    return f"error: {side}" if isinstance(side, str) else type(side).__name__


def _fields(value: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name in value.__struct_fields__:
        field: Any = getattr(value, name)
        path = prefix + name
        if isinstance(field, msgspec.Struct):
            yield from _fields(field, f"{path}.")
        elif isinstance(field, list):
            for index, item in enumerate(field):
                yield from _fields(item, f"{path}[{index}].")
        elif name == "epoch":
            yield path, str(number_of(field))
        else:
            yield path, _shown(name, field)


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bytes):
        value = unpack(value, _BYTES.get(name, np.int32)).tolist()
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
