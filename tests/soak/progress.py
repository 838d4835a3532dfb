"""Progress of each part of the soak, in build/soak: a run that was interrupted goes on where it stopped."""

import json
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Self

DIRECTORY = Path("build/soak")


class Progress:
    """Amount of one part that is done, in its unit."""

    def __init__(self, name: str, of: float, unit: str) -> None:
        self.name, self.of, self.unit = name, of, unit
        self.done = 0.0
        self.seconds = 0.0
        """Time that it has taken."""
        self.happened: Counter[str] = Counter()
        self.failures: list[str] = []

    @classmethod
    def resumed(cls, name: str, of: float, unit: str) -> Self:
        """Return the progress of an earlier run, or a new one if there is none or it has ended."""
        progress = cls(name, of, unit)
        if progress.file.exists():
            saved = json.loads(progress.file.read_text())
            if saved["done"] < saved["of"] == of:
                progress.done, progress.seconds = saved["done"], saved["seconds"]
                progress.happened, progress.failures = Counter(saved["happened"]), saved["failures"]
        return progress

    @property
    def file(self) -> Path:
        return DIRECTORY / f"{self.name}.json"

    @property
    def left(self) -> float:
        return max(0.0, self.of - self.done)

    def add(self, amount: float, seconds: float, happened: Mapping[str, int], failures: list[str]) -> None:
        """Add a piece of the run and store the sum."""
        self.done += amount
        self.seconds += seconds
        self.happened.update(happened)
        self.failures += failures
        DIRECTORY.mkdir(parents=True, exist_ok=True)
        content = {
            "part": self.name, "done": self.done, "of": self.of, "unit": self.unit, "seconds": round(self.seconds),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "failures": self.failures,
            "happened": dict(sorted(self.happened.items())),
        }  # fmt: skip
        self.file.write_text(json.dumps(content, indent=1) + "\n")

    def __str__(self) -> str:
        ended = f"{len(self.failures)} failures" if self.failures else "no failure"
        return f"{self.name}: {self.done:g} of {self.of:g} {self.unit} in {self.seconds / 60:.1f} min, {ended}"
