"""The flight recorder: an observer that appends events to a log, and a thread that writes them to files; and the
listener that attaches it to a core."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from services import release
from services.config import SchedulerConfig
from services.private import make_output
from services.scheduler.build import CoreFactory, CoreListener, CoreStart
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.observer import CoreRestarted, Event, Record
from services.scheduler.recording.conversion import Converter, TokenRemover
from services.scheduler.recording.records import VERSION, RecordingHeader
from services.scheduler.recording.segments import SegmentWriter
from services.scheduler.recording.settings import recorded_settings

log = logging.getLogger("runahead.scheduler.recorder")

WRITE_SECONDS = 0.1
"""Time between two frames."""
SLICE = 16
"""Events after which the thread lets others run: the scheduling loop must not wait for the interpreter."""
MAX_FRAME_RECORDS = 4096
MAX_WAITING = 1_000_000
"""Events that wait to be written; the recording ends if the disk is slower than that."""


class RecordingTooSlow(Exception):
    """Events come faster than they can be written."""


class FlightRecorder:
    """An observer. Inside the scheduling loop it only appends to a log.

    A recording without a gap replays, one with a gap does not. So the recording ends at the first problem, with a log
    line, and the scheduler goes on.
    """

    def __init__(self, header: RecordingHeader, writer: SegmentWriter) -> None:
        self._writer = writer
        whole, limits = Converter(keeps_tokens=True), header.limits
        self._convert = (whole if header.has_tokens else TokenRemover(limits, header.vocab_size)).records
        self._log: deque[Event] = deque(maxlen=MAX_WAITING)
        self.observe: Callable[[Event], None] = self._log.append
        """The only work in the scheduling loop: a function of Python here would double it."""
        self._has_requested_start = False
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def needs_start(self) -> bool:
        """Return whether the core must be restarted now, so that a replay can begin there; true once for each start."""
        if self._has_requested_start or not self._writer.is_start_due:
            return False
        self._has_requested_start = True
        return True

    def close(self) -> None:
        """Write what is left."""
        self._ends.set()
        self._thread.join()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ends.wait(WRITE_SECONDS):
                self._write_log()
            self._write_log()
            return
        except OSError as error:
            reason = f"{error.strerror}: {error.filename or 'a segment'}"
        except RecordingTooSlow as error:
            reason = str(error)
        except Exception as error:  # the recorder must not end the service
            log.exception("recording failed")
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._writer.close()
        self._has_requested_start = True  # for good
        log.error("the recording has ended: %s; what is written can be replayed", reason)
        while not self._ends.wait(WRITE_SECONDS):
            self._log.clear()

    def _write_log(self) -> None:
        records: list[Record] = []
        for count in range(len(self._log)):
            if len(self._log) == MAX_WAITING:
                raise RecordingTooSlow("events come faster than they can be written")
            event = self._log.popleft()
            if isinstance(event, CoreRestarted) or len(records) >= MAX_FRAME_RECORDS:
                self._writer.write(records)
                records = []
            if isinstance(event, CoreRestarted):
                self._writer.start()
                self._has_requested_start = False
            records += self._convert(event)
            if count % SLICE == SLICE - 1:
                time.sleep(0)
        self._writer.write(records)


class LiveRecording(CoreListener):
    """Records the core that serves, for `--record`."""

    def __init__(self, config: SchedulerConfig, incarnation: int, directory: str) -> None:
        """Raises: OSError, if the directory cannot be written, or others can read it"""
        self._config, self._incarnation = config, incarnation
        self._directory = Path(os.path.expanduser(directory))
        make_output(self._directory)
        self._recorder: FlightRecorder | None = None

    def attach(self, core: EngineCore, start: CoreStart) -> None:
        header = _header(self._config, self._incarnation, start)
        try:
            writer = SegmentWriter(
                self._directory, lambda segment: replace(header, segment=segment), self._config.record_max_bytes
            )
        except OSError as error:  # a scheduler that is started again, perhaps; its disk may have filled meanwhile
            log.error("nothing is recorded: %s: %s", error.strerror, self._directory)
            return
        self._recorder = FlightRecorder(header, writer)
        core.observers.add(self._recorder)
        log.info("recording to %s, %s tokens", self._directory, "with" if self._config.record_tokens else "without")

    def on_turn(self, core: EngineCore) -> None:
        """Restart the core if the recording needs another start and the core has nothing to do."""
        if core.is_empty and self._recorder is not None and self._recorder.needs_start():
            log.info("a part of the recording begins that can be replayed; the prefix cache is emptied for it")
            point, factory = core.restart_point(), CoreFactory(self._config)
            core.restart(point, factory.policy(point.limits), factory.drafting())

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()


def _header(config: SchedulerConfig, incarnation: int, start: CoreStart) -> RecordingHeader:
    """Return the header of the first segment."""
    return RecordingHeader(
        VERSION,
        incarnation,
        0,
        config.record_tokens,
        recorded_settings(config),
        start.limits,
        start.epoch,
        start.vocab_size,
        start.hidden_size,
        start.compiler is not None,
        release.version(),
        late_masks=start.mask_maker.late,
        backend=start.backend,
    )
