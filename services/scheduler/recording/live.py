"""The recording of the core that serves, for `--record`."""

import logging

from msgspec.structs import replace

from services import release
from services.config import SchedulerConfig
from services.scheduler.build import CoreStart, restart_core
from services.scheduler.core.engine import EngineCore
from services.scheduler.recording.recorder import FlightRecorder
from services.scheduler.recording.records import VERSION, RecordingHeader
from services.scheduler.recording.segments import SegmentWriter, prepare_directory
from services.scheduler.recording.settings import recorded_settings

log = logging.getLogger("runahead.scheduler")


class LiveRecording:
    """A `CoreListener`."""

    def __init__(self, config: SchedulerConfig, incarnation: int, directory: str) -> None:
        """Raises: OSError, if the directory cannot be written."""
        self._config, self._incarnation = config, incarnation
        self._directory = prepare_directory(directory)
        self._recorder: FlightRecorder | None = None

    def attach(self, core: EngineCore, start: CoreStart) -> None:
        """Raises: OSError, if the directory cannot be written."""
        header = _header(self._config, self._incarnation, start)
        writer = SegmentWriter(
            self._directory, lambda segment: replace(header, segment=segment), self._config.record_max_bytes
        )
        self._recorder = FlightRecorder(header, writer)
        core.observers.add(self._recorder)
        log.info(
            "recording to %s, %s tokens", self._directory, "with" if self._config.record_tokens else "without"
        )

    def on_turn(self, core: EngineCore) -> None:
        """Restart the core if the recording needs another start and the core has nothing to do."""
        if core.is_empty and self._recorder is not None and self._recorder.needs_start():
            log.info(
                "a part of the recording begins that can be replayed; the prefix cache is emptied for it"
            )
            restart_core(core, self._config)

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
