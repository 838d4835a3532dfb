"""Identifiers of schedulers and of epochs.

An *incarnation* identifies one scheduler process: the milliseconds since 1970 at its start. An epoch is (incarnation,
number); messages carry both as one integer, so that a later epoch always compares greater, also that of a restarted
scheduler. No identifier is used twice (incarnation, docs/invariants.md).
"""

from typing import Annotated

from msgspec import Meta

NUMBER_BITS = 20
"""Bits of an epoch's number within its incarnation."""

Incarnation = Annotated[int, Meta(ge=0, lt=2**43)]
"""Milliseconds since 1970; 0: unknown."""
EpochId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""`incarnation << NUMBER_BITS | number`; 0: no epoch."""
RegisteredEpoch = Annotated[int, Meta(ge=0, lt=2**62)]
"""`EpochId` that a worker registers with. The scheduler's next epoch is later, and must be an `EpochId` as well."""


def first_epoch(incarnation: int) -> int:
    """Return the identifier that precedes the first epoch of a scheduler."""
    return incarnation << NUMBER_BITS


def incarnation_of(epoch: int) -> int:
    return epoch >> NUMBER_BITS


def number_of(epoch: int) -> int:
    """Return the epoch's number within its incarnation: 1, 2, 3 ..."""
    return epoch & ((1 << NUMBER_BITS) - 1)
