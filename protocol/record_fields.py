"""Step records as plain values for JSON: times and counts by name, columns as lists."""

from typing import Any

import msgspec
import numpy as np

from protocol.codec import unpack
from protocol.records import EngineEvent, RankTimes, RequestRecord, StepRecord

COLUMNS = ("frontends", "numbers", "scheduled", "prefills", "drafted", "generated")
"""Fields of `StepRecord` with an element per row."""


def request_name(frontend: int, number: int) -> str:
    """Return the name of a request in records: FRONTEND/NUMBER."""
    return f"{frontend}/{number}"


def step_fields(record: StepRecord) -> dict[str, Any]:
    """Return the fields of a step without its rows."""
    fields = msgspec.structs.asdict(record)
    for name in COLUMNS:
        del fields[name]
    return {"kind": "step"} | fields | {"ranks": [*map(_rank_fields, record.ranks)]}


def _rank_fields(rank: RankTimes) -> dict[str, Any]:
    return {"rank": rank.rank, "returns_result": rank.returns_result} | msgspec.structs.asdict(rank.times)


def row_columns(record: StepRecord) -> dict[str, list[Any]]:
    """Return the rows of a step as columns."""
    frontends, numbers = unpack(record.frontends).tolist(), unpack(record.numbers, np.uint32).tolist()
    return {
        "requests": [*map(request_name, frontends, numbers)],
        "scheduled": unpack(record.scheduled).tolist(),
        "prefills": unpack(record.prefills, np.bool_).tolist(),
        "drafted": unpack(record.drafted).tolist(),
        "generated": unpack(record.generated).tolist(),
    }


def event_fields(event: EngineEvent) -> dict[str, Any]:
    return {"kind": event.kind.name.lower(), "at": event.at, "epoch": event.epoch, "text": event.text}


def request_fields(record: RequestRecord) -> dict[str, Any]:
    fields = msgspec.structs.asdict(record)
    name = request_name(fields.pop("frontend"), fields.pop("number"))
    return {"kind": "request", "request": name} | fields | {"times": msgspec.structs.asdict(record.times)}
