"""The file of `--step-trace`: a JSON line for each step record, engine event and request."""

import contextlib
import json
import logging

from protocol.record_fields import event_fields, request_fields, row_columns, step_fields
from protocol.records import StepRecords

log = logging.getLogger("runahead.scheduler")


class StepTrace:
    """Appends lines to a file; a line is complete when `write` returns.

    An error of writing, such as a full disk, ends the trace with one log line. The scheduler serves on.
    """

    def __init__(self, path: str) -> None:
        """Raises: OSError"""
        self._path = path
        self._file = open(path, "w", buffering=1)  # noqa: SIM115 - closed by `close`

    def write(self, batch: StepRecords) -> None:
        if self._file.closed:
            return
        lines = [(event.at, event_fields(event)) for event in batch.events]
        lines += [(record.applied, step_fields(record) | row_columns(record)) for record in batch.records]
        lines += [(request.times.ended, request_fields(request)) for request in batch.requests]
        if batch.dropped:
            lines.append((0.0, {"kind": "dropped", "count": batch.dropped}))
        try:
            for _, line in sorted(lines, key=lambda pair: pair[0]):
                self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            log.error("the step trace ends: %s cannot be written: %s", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        # What the buffer holds cannot be written either; the file is closed
        with contextlib.suppress(OSError):
            self._file.close()
