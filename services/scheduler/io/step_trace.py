"""The file of `--step-trace`: a JSON line for each step record and each engine event."""

import json
from typing import Any

import msgspec
import numpy as np

from protocol.codec import unpack
from protocol.records import EngineEvent, StepRecord, StepRecords


class StepTrace:
    """Appends lines to a file; a line is complete when `write` returns."""

    def __init__(self, path: str) -> None:
        """Raises: OSError"""
        self._file = open(path, "w", buffering=1)  # noqa: SIM115 - closed by `close`

    def write(self, batch: StepRecords) -> None:
        lines = [(event.at, _event(event)) for event in batch.events]
        lines += [(record.applied, _step(record)) for record in batch.records]
        if batch.dropped:
            lines.append((0.0, {"kind": "dropped", "count": batch.dropped}))
        for _, line in sorted(lines, key=lambda pair: pair[0]):
            self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._file.close()


def _event(event: EngineEvent) -> dict[str, Any]:
    return {"kind": event.kind.name.lower(), "at": event.at, "epoch": event.epoch, "text": event.text}


def _step(record: StepRecord) -> dict[str, Any]:
    line = msgspec.structs.asdict(record)
    frontends, numbers = unpack(record.frontends).tolist(), np.frombuffer(record.numbers, np.uint32).tolist()
    del line["frontends"], line["numbers"]
    line |= {name: unpack(line[name]).tolist() for name in ("scheduled", "drafted", "generated")}
    line["prefills"] = np.frombuffer(record.prefills, np.bool_).tolist()
    line["requests"] = [f"{frontend}/{number}" for frontend, number in zip(frontends, numbers, strict=True)]
    line["ranks"] = [{"rank": r.rank} | msgspec.structs.asdict(r.times) for r in record.ranks]
    return {"kind": "step"} | line
