"""JSON as text, where clients' values are read and passed on."""

from typing import Any

import msgspec

MAX_DEPTH = 128
"""Levels of lists and objects in a value that is read: what writes it later recurses, or has a limit of its own."""
_NESTING = frozenset((dict, list))


def json_value(text: bytes | str, kind: Any = Any) -> Any:
    """Return a value of strict JSON: UTF-8 without lone surrogates, no NaN, no numbers beyond float64.

    Args:
        kind: type of the value.

    Raises: msgspec.MsgspecError, or ValueError; RecursionError, if it has more than `MAX_DEPTH` levels.
    """
    raw = text.encode() if isinstance(text, str) else text
    value = msgspec.json.decode(raw, type=kind)
    if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH and _is_deep(value):
        raise RecursionError(f"more than {MAX_DEPTH} levels")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        nesting = (items for items in inner if not _NESTING.isdisjoint(map(type, items)))  # at C's speed
        level = [item for items in nesting for item in items if type(item) in _NESTING]
        if not level:
            return False
    return True


def json_text(value: Any) -> str:
    """Return a JSON value as compact text."""
    return msgspec.json.encode(value).decode()
