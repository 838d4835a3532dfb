"""Recordings of a soak, and their replay: every decision must be the same again."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from services.scheduler.recording import EventRecording, Replay, describe
from tests.soak.progress import DIRECTORY

Result = tuple[Counter[str], list[str]]


def replayed(run: Callable[[str], Result]) -> Callable[[int, int], Result]:
    """Return a piece of a soak that runs servers which record into a directory, and then replays what they recorded.

    A recording that differs is kept in build/soak.
    """

    def piece(first: int, count: int) -> Result:
        with tempfile.TemporaryDirectory(prefix="ra-") as directory:
            happened, failures = run(directory)
            for incarnation in EventRecording(Path(directory)).incarnations:
                replay = Replay(EventRecording(Path(directory), incarnation))
                difference = replay.run()
                happened += Counter({"recordings": 1, "events": replay.num_events, "plans": replay.num_plans})
                if difference is not None:
                    kept = shutil.copytree(directory, DIRECTORY / f"recording-{incarnation}")
                    failures.append(f"{kept}: {describe(difference)}")
        return happened, failures

    return piece
