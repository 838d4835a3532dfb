"""Replay of a recording of the placement core."""

from collections.abc import Iterable
from itertools import zip_longest

from services.frontend.placement import records
from services.frontend.placement.placement import Placement


def replay(recording: Iterable[records.Record]) -> list[records.Record]:
    """Pass the events of a recording to a new core. Return what it records: the same events and its own decisions.

    Raises: ValueError, if the recording does not begin with the start of a core; PluginError, if its policy is not
    installed.
    """
    found: list[records.Record] = []
    events = iter(recording)
    if not isinstance(started := next(events, None), records.PlacementStarted):
        raise ValueError("the recording does not begin with the start of a core")
    core = Placement(started.policy, started.limits, started.seed, found.append)
    for event in events:
        match event:
            case records.Advanced(now=now):
                core.advance(now)
            case records.EngineReported(name=name, report=report):
                core.on_engine(name, report)
            case records.EngineRemoved(name=name):
                core.on_engine_removed(name)
            case records.BlocksStored(name=name, block_names=names):
                core.on_blocks_stored(name, names)
            case records.BlocksRemoved(name=name, block_names=names):
                core.on_blocks_removed(name, names)
            case records.BlocksCleared(name=name):
                core.on_blocks_cleared(name)
            case records.PlacementRequested():
                core.place_named(event.key, event.num_tokens, event.names, event.identity_required)
            case records.RequestEnded(key=key):
                core.on_ended(key)
            case records.Prefilled(key=key):
                core.prefilled(key)
            case records.MovesRequested():
                core.moves()
    return found


def first_difference(recording: Iterable[records.Record]) -> tuple[records.Record | None, records.Record | None] | None:
    """Return the first record that differs, and what the replay has in its place; None if they are equal."""
    recorded = list(recording)
    pairs = zip_longest(recorded, replay(recorded))
    return next((pair for pair in pairs if pair[0] != pair[1]), None)
