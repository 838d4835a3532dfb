"""Settings of the scheduler in a recording: those that its core depends on."""

from pydantic import ValidationError

from services.config import SchedulerConfig, ServiceConfig
from services.scheduler.recording.records import RecordingHeader
from services.scheduler.recording.segments import RecordingError

NOT_RECORDED = {
    *ServiceConfig.model_fields,
    *("worker_endpoint", "client_endpoint", "model", "revision", "tokenizer", "step_trace"),
    *("record", "record_max_bytes", "record_tokens", "kv_events_config"),
}
"""Settings that the core does not depend on."""


def recorded_settings(config: SchedulerConfig) -> str:
    """Return `RecordingHeader.config`."""
    return config.model_dump_json(exclude=NOT_RECORDED, exclude_unset=True)


def settings_of(header: RecordingHeader) -> SchedulerConfig:
    """Return the settings of a recorded scheduler.

    Raises: RecordingError, if this release does not have them.
    """
    try:
        return SchedulerConfig.model_validate_json(header.config)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise RecordingError(
            f"release {header.release} wrote the recording with settings that this release does not have: "
            f"{where}: {problem['msg']}"
        ) from None
