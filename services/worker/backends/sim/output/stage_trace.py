"""The stage trace: when each stage computed each step, a JSON line per step, for plots of a pipeline's occupancy."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StageTrace:
    """Appends lines to `path`; all stages of a machine may share the file.

    A line has `epoch`, `step_id`, `stage`, `began` and `ended` (monotonic seconds on the modelled timeline) and
    `tokens`, the number of positions computed.
    """

    path: Path
    stage: int

    def write(self, epoch: int, step_id: int, began: float, ended: float, tokens: int) -> None:
        line = {
            "epoch": epoch, "step_id": step_id, "stage": self.stage, "began": began, "ended": ended, "tokens": tokens
        }  # fmt: skip
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
