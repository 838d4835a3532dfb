"""Step records for tests of the ring and of its readers."""

import numpy as np

from protocol.codec import pack
from protocol.epochs import first_epoch
from protocol.records import RankTimes, StepRecord, StepRecords
from protocol.steps import StepTimes

INCARNATION = 1_763_900_000_123
EPOCH = first_epoch(INCARNATION) + 2


def step(step_id: int, rows: int = 2) -> StepRecord:
    """Return a step of one prefill chunk of 5 tokens and decodes with 3 drafts each, of which 2 are accepted."""
    others = rows - 1
    return StepRecord(
        EPOCH, step_id, step_id + 0.0, step_id + 0.1, step_id + 0.8, step_id + 0.9,
        [RankTimes(0, StepTimes(forward_began=step_id + 0.2), True)],
        pack([0] * rows), pack(np.arange(rows, dtype=np.uint32)), pack([5] + [4] * others),
        b"\1" + b"\0" * others, pack([0] + [3] * others), pack([1] + [3] * others), 2, 3, 4, 0.5,
    )  # fmt: skip


def batch(*records: StepRecord, sent: float = 0.0, **more: object) -> StepRecords:
    return StepRecords(list(records), more.pop("events", []), more.pop("dropped", 0), sent, **more)
