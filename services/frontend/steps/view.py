"""The JSON of ring entries. An epoch is a pair of numbers: packed into one, it exceeds the integers of JavaScript."""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.epochs import incarnation_of, number_of
from protocol.record_fields import event_fields, request_fields, row_columns, step_fields
from protocol.records import EngineEvent, RequestRecord, StepRecord
from services.frontend.steps.ring import RingEntry

_encoder = msgspec.json.Encoder()


def entry_json(entry: RingEntry, with_rows: bool) -> bytes:
    """Return the JSON of an entry; without rows it is made once for all viewers."""
    if with_rows and isinstance(entry.record, StepRecord):
        return _encoder.encode(_fields(entry) | row_columns(entry.record))
    if entry.summary is None:
        entry.summary = _encoder.encode(_fields(entry))
    return entry.summary


def _fields(entry: RingEntry) -> dict[str, Any]:
    sequence: dict[str, Any] = {"sequence": entry.sequence}
    match entry.record:
        case StepRecord() as record:
            return sequence | step_fields(record) | _epoch_pair(record.epoch) | _sums(record)
        case EngineEvent() as record:
            return sequence | event_fields(record) | _epoch_pair(record.epoch)
        case RequestRecord() as record:
            return sequence | request_fields(record)
        case count:
            return sequence | {"kind": "dropped", "count": count}


def _epoch_pair(epoch: int) -> dict[str, int]:
    return {"incarnation": incarnation_of(epoch), "epoch": number_of(epoch)}


def _sums(record: StepRecord) -> dict[str, int]:
    """Return the numbers of rows and of tokens. A row with drafts yields its accepted ones and one more token."""
    scheduled, generated = unpack(record.scheduled), unpack(record.generated)
    prefill = drafts = accepted = 0
    if b"\1" in record.prefills:
        prefill = _sum(scheduled[unpack(record.prefills, np.bool_)])
    if record.drafted != bytes(len(record.drafted)):
        drafted = unpack(record.drafted)
        drafts, accepted = _sum(drafted), _sum(np.maximum(generated - 1, 0)[drafted > 0])
    return {
        "rows": len(scheduled),
        "prefill_tokens": prefill,
        "decode_tokens": _sum(scheduled) - prefill - drafts,
        "draft_tokens": drafts,
        "accepted_tokens": accepted,
        "output_tokens": _sum(generated),
    }


def _sum(column: NDArray[np.int32]) -> int:
    """Return the sum in half the time of the method `sum`."""
    return int(np.add.reduce(column))
