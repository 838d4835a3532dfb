"""The file of `--step-trace`: a JSON line for each step record, engine event and request."""

import json

from protocol.record_fields import event_fields, request_fields, row_columns, step_fields
from protocol.records import StepRecords


class StepTrace:
    """Appends lines to a file; a line is complete when `write` returns."""

    def __init__(self, path: str) -> None:
        """Raises: OSError"""
        self._file = open(path, "w", buffering=1)  # noqa: SIM115 - closed by `close`

    def write(self, batch: StepRecords) -> None:
        lines = [(event.at, event_fields(event)) for event in batch.events]
        lines += [(record.applied, step_fields(record) | row_columns(record)) for record in batch.records]
        lines += [(request.times.ended, request_fields(request)) for request in batch.requests]
        if batch.dropped:
            lines.append((0.0, {"kind": "dropped", "count": batch.dropped}))
        for _, line in sorted(lines, key=lambda pair: pair[0]):
            self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._file.close()
