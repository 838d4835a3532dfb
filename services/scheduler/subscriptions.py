"""Receivers of step records: frontends that subscribed, and the file of `--step-trace`.

While nobody does, no recorder is attached to the core and plans do not ask ranks for their times.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterable

from protocol.record_fields import event_fields, request_fields, row_columns, step_fields
from protocol.records import RankTimes, StepRecords
from protocol.steps import ModelRunnerOutput, StepReport
from services.scheduler.build import CoreListener, CoreStart
from services.scheduler.core.engine import EngineCore
from services.scheduler.step_records import StepRecorder

log = logging.getLogger("runahead.scheduler")


class StepTrace:
    """The file of `--step-trace`: a JSON line for each step record, engine event and request.

    A line is complete when `write` returns.

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


BATCH_SECONDS = 0.5
"""Shortest time between two batches of records. A message costs a subscriber more than the records of many steps."""


class Subscriptions(CoreListener):
    """Attaches a recorder when somebody needs records, and detaches it when nobody does."""

    def __init__(self, trace_path: str | None) -> None:
        """`trace_path`: file of the step trace; None: no trace. Raises: OSError, if the file cannot be written."""
        self.frontends: set[int] = set()
        self._trace = StepTrace(trace_path) if trace_path else None
        self._core: EngineCore | None = None
        self._recorder: StepRecorder | None = None
        self._ranks: list[bytes] = []
        """The workers of the epoch in effect; empty: there is none."""
        self._next_batch = 0.0

    @property
    def active(self) -> bool:
        return bool(self.frontends) or self._trace is not None

    @property
    def pending(self) -> bool:
        """Records wait to be taken."""
        return self._recorder is not None and self._recorder.pending

    def set(self, frontend: int, subscribed: bool) -> None:
        (self.frontends.add if subscribed else self.frontends.discard)(frontend)
        self._attach_recorder()

    def start_epoch(self, ranks: list[bytes]) -> None:
        """Steps of these workers follow."""
        self._ranks = ranks
        if self._recorder is not None:
            self._recorder.set_num_ranks(len(ranks))

    def end_epoch(self) -> None:
        self._ranks = []

    def attach(self, core: EngineCore, start: CoreStart) -> None:
        self._core = core
        self._attach_recorder()

    def _attach_recorder(self) -> None:
        """Attach a recorder if there are subscribers, or detach it if there are none."""
        if self._core is None:
            return
        if self.active and self._recorder is None:
            self._recorder = StepRecorder(len(self._ranks), self._core.epoch.number)
            self._core.observers.add(self._recorder)
            self._core.observers.rank_times = True
        elif not self.active and self._recorder is not None:
            self._core.observers.remove(self._recorder)
            self._core.observers.rank_times = False
            self._recorder = None

    def add_times(
        self, worker: bytes, message: ModelRunnerOutput | StepReport, clock_offset: Callable[[bytes], float]
    ) -> None:
        """Add the times of a rank; those of other workers are ignored.

        Args:
            clock_offset: returns the seconds by which a worker's clock is ahead of the scheduler's.
        """
        if self._recorder is not None and worker in self._ranks:
            returns_result = isinstance(message, ModelRunnerOutput)
            rank = RankTimes(self._ranks.index(worker), message.times, returns_result)
            self._recorder.add_times(message.epoch, message.step_id, rank, clock_offset(worker))

    def take(self, now: float) -> tuple[StepRecords, Iterable[int]] | None:
        """The next batch and the frontends that get it; None if none is due. Writes the trace.

        `now`: seconds, monotonic.
        """
        if self._recorder is None or now < self._next_batch or (batch := self._recorder.take()) is None:
            return None
        self._next_batch = now + BATCH_SECONDS
        if self._trace is not None:
            self._trace.write(batch)
        return batch, tuple(self.frontends)

    def close(self) -> None:
        """Write what is left to the trace."""
        if self._trace is not None:
            if self._recorder is not None and (batch := self._recorder.take(everything=True)) is not None:
                self._trace.write(batch)
            self._trace.close()
