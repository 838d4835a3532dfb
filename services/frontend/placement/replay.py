"""Replay of a recording of the placement core."""

from collections.abc import Iterable
from itertools import zip_longest

from msgspec.structs import astuple

from services.frontend.placement import records
from services.frontend.placement.placement import INPUTS, Placement


def replay(recording: Iterable[records.Record]) -> list[records.Record]:
    """Pass the events of a recording to a new core. Return what it records: the same events and its own decisions.

    Raises: ValueError, if the recording does not begin with the start of a core; PluginError, if its policy is not
    installed.
    """
    found: list[records.Record] = []
    events = iter(recording)
    if not isinstance(started := next(events, None), records.PlacementStarted):
        raise ValueError("the recording does not begin with the start of a core")
    core = Placement(started.policy, started.max_blocks, started.seed, found.append)
    for event in events:
        if (method := INPUTS.get(type(event))) is not None:
            method(core, *astuple(event))
    return found


def first_difference(recording: Iterable[records.Record]) -> tuple[records.Record | None, records.Record | None] | None:
    """Return the first record that differs, and what the replay has in its place; None if they are equal."""
    recorded = list(recording)
    pairs = zip_longest(recorded, replay(recorded))
    return next((pair for pair in pairs if pair[0] != pair[1]), None)
