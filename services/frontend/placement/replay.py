"""Replay of a recording of the placement core."""

from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any, Union

import msgspec
from msgspec.structs import astuple

from services.frontend.placement.decisions import Decision, LoadAhead, Move
from services.frontend.placement.placement import Placement
from services.frontend.placement.records import INPUTS, PlacementStarted, Record

_KINDS: Any = Union[PlacementStarted, Decision, Move, LoadAhead, *INPUTS]
decode_record: Callable[[bytes], Record] = msgspec.json.Decoder(_KINDS).decode
"""Raises: msgspec.MsgspecError, if a line is no record"""


def replay(recording: Iterable[Record]) -> list[Record]:
    """Pass the events of a recording to a new core. Return what it records: the same events and its own decisions.

    Raises: ValueError, if the recording does not begin with the start of a core; PluginError, if its policy is not
    installed.
    """
    found: list[Record] = []
    events = iter(recording)
    if not isinstance(started := next(events, None), PlacementStarted):
        raise ValueError("the recording does not begin with the start of a core")
    core = Placement(started.policy, started.max_blocks, started.seed, found.append)
    for event in events:
        if (method := INPUTS.get(type(event))) is not None:
            method(core, *astuple(event))
    return found


def first_difference(recording: Iterable[Record]) -> tuple[Record | None, Record | None] | None:
    """Return the first record that differs, and what the replay has in its place; None if they are equal."""
    recorded = list(recording)
    pairs = zip_longest(recorded, replay(recorded))
    return next((pair for pair in pairs if pair[0] != pair[1]), None)
