"""Start of a recording by the service."""

from importlib.metadata import version
from pathlib import Path

from services.config import SchedulerConfig, ServiceConfig
from services.scheduler.core.limits import Limits
from services.scheduler.recording.recorder import FlightRecorder
from services.scheduler.recording.records import VERSION, RecordingHeader
from services.scheduler.recording.segments import SegmentWriter

NOT_RECORDED = {
    *ServiceConfig.model_fields,
    *("worker_endpoint", "client_endpoint", "model", "revision", "tokenizer", "step_trace"),
    *("record", "record_max_bytes", "record_tokens", "kv_events_config"),
}
"""Settings that the core does not depend on."""


def start_recording(
    config: SchedulerConfig,
    directory: Path,
    incarnation: int,
    limits: Limits,
    epoch: int,
    vocab_size: int,
    hidden_size: int,
    compiles: bool,
    late_masks: bool,
    backend: str,
) -> FlightRecorder:
    """Record a core that starts with these sizes.

    Raises: OSError, if the directory cannot be written.
    """

    def header(segment: int) -> RecordingHeader:
        return RecordingHeader(
            VERSION,
            incarnation,
            segment,
            config.record_tokens,
            config.model_dump_json(exclude=NOT_RECORDED, exclude_unset=True),
            limits,
            epoch,
            vocab_size,
            hidden_size,
            compiles,
            version("runahead-engine"),
            late_masks=late_masks,
            backend=backend,
        )

    return FlightRecorder(header(0), SegmentWriter(directory, header, config.record_max_bytes))
