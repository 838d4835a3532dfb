"""`runahead replay DIR`: prove that a recording replays, or predict what other settings would have done."""

from pathlib import Path

from services.cli.settings import ConfigurationError
from services.config import ReplayConfig
from services.scheduler.recording import EventRecording, RecordingError, Replay, describe

DIFFERS = 1
"""Exit status if a decision differs."""


def replay(config: ReplayConfig) -> int:
    """Replay a recording and compare every decision, or with changed settings print a prediction.

    Returns: 0; 1 if a decision differs.

    Raises: ConfigurationError
    """
    if not config.recording:
        raise ConfigurationError("replay needs the directory of a recording: runahead replay DIR")
    try:
        if config.chart and not config.is_what_if:
            raise ConfigurationError(
                "--chart draws a prediction: name a setting to change, as --batch-queue-depth 1"
            )
        recording = EventRecording(Path(config.recording).expanduser(), config.incarnation)
        print(_title(recording), flush=True)
        if config.is_what_if:
            from services.cli.what_if import print_prediction

            return print_prediction(config, recording)
        return _prove(recording)
    except (RecordingError, ValueError) as error:
        raise ConfigurationError(str(error)) from None


def _title(recording: EventRecording) -> str:
    h, count = recording.header, len(recording.incarnations)
    others = f"; {count - 1} older ones are in the directory (--incarnation)" if count > 1 else ""
    tokens = "with" if h.has_tokens else "without"
    backend = f" on backend {h.backend}" if h.backend else ""
    return f"recording {recording.incarnation} of release {h.release}{backend}, {tokens} tokens{others}"


def _prove(recording: EventRecording) -> int:
    run = Replay(recording)
    if recording.first_start:
        print(
            f"from segment {recording.first_start}: the recording before it was deleted (--record-max-bytes)"
        )
    difference = run.run()
    if recording.torn:
        print(recording.torn)
    if difference is not None:
        print(describe(difference))
        return DIFFERS
    print(f"equal: {run.num_plans:,} plans after {run.num_events:,} events")
    return 0
