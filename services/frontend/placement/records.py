"""Everything that enters the placement core, and every decision that leaves it, as data.

A recording has names of blocks instead of tokens: it does not contain a text, but confirms a guess of one. It replays:
`replay` (services.frontend.placement.replay) passes the events to a new core.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from services.frontend.placement import decisions


class PlacementStarted(msgspec.Struct, frozen=True, tag="started"):
    policy: str
    seed: int
    max_blocks: int


class Advanced(msgspec.Struct, frozen=True, tag="advanced"):
    now: float


class EngineReported(msgspec.Struct, frozen=True, tag="engine"):
    name: str
    report: decisions.EngineReport


class EngineRemoved(msgspec.Struct, frozen=True, tag="engine_removed"):
    name: str


class BlocksStored(msgspec.Struct, frozen=True, tag="blocks_stored"):
    name: str
    block_names: Sequence[bytes]


class BlocksRemoved(msgspec.Struct, frozen=True, tag="blocks_removed"):
    name: str
    block_names: Sequence[bytes]


class BlocksCleared(msgspec.Struct, frozen=True, tag="blocks_cleared"):
    name: str


class PlacementRequested(msgspec.Struct, frozen=True, tag="request"):
    """A decision follows."""

    key: int
    num_tokens: int
    names: Mapping[int, Sequence[bytes]]
    """Names of the prompt's prefixes by block size; empty if they were not needed."""
    identity_required: str
    refused: tuple[str, ...] = ()
    for_good: tuple[str, ...] = ()


class RefusalsForgotten(msgspec.Struct, frozen=True, tag="refusals_forgotten"):
    name: str


class RequestEnded(msgspec.Struct, frozen=True, tag="ended"):
    key: int


class Prefilled(msgspec.Struct, frozen=True, tag="prefilled"):
    """A move follows, if the key is known."""

    key: int


class MovesRequested(msgspec.Struct, frozen=True, tag="moves_requested"):
    """The moves follow."""


Event = (
    PlacementStarted | Advanced | EngineReported | EngineRemoved | BlocksStored | BlocksRemoved | BlocksCleared
    | PlacementRequested | RefusalsForgotten | RequestEnded | Prefilled | MovesRequested
)  # fmt: skip
Record = Event | decisions.Place | decisions.Hold | decisions.RefuseRequest | decisions.Move | decisions.LoadAhead
Recorder = Callable[[Record], None]

encode_record: Callable[[Record], bytes] = msgspec.json.Encoder().encode
decode_record: Callable[[bytes], Record] = msgspec.json.Decoder(Record).decode
"""Raises: msgspec.MsgspecError, if a line is no record"""
