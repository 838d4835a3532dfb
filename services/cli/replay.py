"""`runahead replay PATH`: prove that a recording replays, or predict what other settings would have done."""

import os
from pathlib import Path

from services.cli.settings import ConfigurationError, refusing
from services.config import ReplayConfig
from services.frontend.engine.placement_recording import read_recordings
from services.frontend.placement import Decision, Move
from services.frontend.placement.records import Record
from services.frontend.placement.replay import first_difference
from services.plugins import PluginError
from services.scheduler.recording import EventRecording, RecordingError, Replay, describe

DIFFERS = 1
"""Exit status if a decision differs."""


def replay(config: ReplayConfig) -> int:
    """Replay a recording and compare every decision, or with changed settings print a prediction. Return 0; 1 if a
    decision differs. Raises: ConfigurationError
    """
    if not config.recording:
        raise ConfigurationError("replay needs the directory of a recording: runahead replay DIR")
    if (path := Path(os.path.expanduser(config.recording))).is_file():
        if config.is_what_if:
            raise ConfigurationError("a recording of placement only replays: leave the other settings out")
        return _prove_placement(path)
    with refusing(RecordingError, ValueError):
        if config.chart and not config.is_what_if:
            raise ConfigurationError("--chart draws a prediction: name a setting to change, as --batch-queue-depth 1")
        recording = EventRecording(path, config.incarnation)
        print(_title(recording), flush=True)
        if config.is_what_if:
            from services.cli.what_if import print_prediction

            return print_prediction(config, recording)
        return _prove(recording)


def _title(recording: EventRecording) -> str:
    h, count = recording.header, len(recording.incarnations)
    others = f"; {count - 1} older ones are in the directory (--incarnation)" if count > 1 else ""
    tokens = "with" if h.has_tokens else "without"
    backend = f" on backend {h.backend}" if h.backend else ""
    return f"recording {recording.incarnation} of release {h.release}{backend}, {tokens} tokens{others}"


def _prove(recording: EventRecording) -> int:
    run = Replay(recording)
    if recording.first_start:
        print(f"from segment {recording.first_start}: the recording before it was deleted (--record-max-bytes)")
    difference = run.run()
    if recording.torn:
        print(recording.torn)
    if difference is not None:
        print(describe(difference))
        return DIFFERS
    print(f"equal: {run.num_plans:,} plans after {run.num_events:,} events")
    return 0


def _prove_placement(path: Path) -> int:
    """Replay a file of --record-placement. Raises: ConfigurationError"""
    recording: list[Record] = []
    with refusing(OSError, ValueError, PluginError):
        for recording in read_recordings(path):
            if (difference := first_difference(recording)) is not None:
                print(f"another decision: recorded {difference[0]}, now {difference[1]}")
                return DIFFERS
            decisions = sum(isinstance(record, Decision | Move) for record in recording)
            print(f"equal: {decisions:,} decisions after {len(recording) - decisions:,} events")
    if not recording:
        raise ConfigurationError(f"{path} contains no recording of placement")
    return 0
