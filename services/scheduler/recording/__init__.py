"""Recordings: what entered the core and what it decided, in files; and their replay."""

from services.scheduler.recording.describe import describe
from services.scheduler.recording.recorder import FlightRecorder, LiveRecording
from services.scheduler.recording.records import RecordingHeader
from services.scheduler.recording.replay import Difference, Replay
from services.scheduler.recording.segments import EventRecording, RecordingError, SegmentWriter
from services.scheduler.recording.settings import settings_of
