"""Receivers of step records: frontends that subscribed, and the file of `--step-trace`.

While nobody does, no recorder is attached to the core and plans do not ask ranks for their times.
"""

from collections.abc import Iterable

from protocol.records import RankTimes, StepRecords
from services.scheduler.core.engine import EngineCore
from services.scheduler.io.step_trace import StepTrace
from services.scheduler.step_records import StepRecorder

BATCH_SECONDS = 0.5
"""Shortest time between two batches of records. A message costs a subscriber more than the records of many steps."""
PING_SECONDS = 1.0
"""Time between two measurements of each worker's clock."""


class Subscriptions:
    def __init__(self, trace: StepTrace | None) -> None:
        self.frontends: set[int] = set()
        self._trace = trace
        self._recorder: StepRecorder | None = None
        self._num_ranks, self._epoch = 0, 0
        self._next_batch = self._next_ping = 0.0

    @property
    def active(self) -> bool:
        return bool(self.frontends) or self._trace is not None

    @property
    def pending(self) -> bool:
        """Records wait to be taken."""
        return self._recorder is not None and self._recorder.pending

    def set(self, frontend: int, subscribed: bool) -> None:
        (self.frontends.add if subscribed else self.frontends.discard)(frontend)

    def start_epoch(self, num_ranks: int, epoch: int) -> None:
        self._num_ranks, self._epoch = num_ranks, epoch
        if self._recorder is not None:
            self._recorder.set_num_ranks(num_ranks)

    def attach(self, core: EngineCore) -> None:
        """Attach a recorder if there are subscribers, or detach it if there are none."""
        if self.active and self._recorder is None:
            self._recorder = StepRecorder(self._num_ranks, self._epoch)
            core.attach(self._recorder)
            core.observers.rank_times = True
        elif not self.active and self._recorder is not None:
            core.observers.remove(self._recorder)
            core.observers.rank_times = False
            self._recorder = None

    def add_times(self, epoch: int, step_id: int, rank: RankTimes, clock_offset: float) -> None:
        """Add the times of a rank. `clock_offset`: seconds by which its clock is ahead of the scheduler's."""
        if self._recorder is not None:
            self._recorder.add_times(epoch, step_id, rank, clock_offset)

    def ping_due(self, now: float) -> bool:
        """Return whether the workers' clocks must be measured now. `now`: seconds, monotonic."""
        if self._recorder is None or now < self._next_ping:
            return False
        self._next_ping = now + PING_SECONDS
        return True

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
