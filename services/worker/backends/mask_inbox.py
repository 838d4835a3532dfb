"""Grammar masks between the main thread and the thread that samples, and when the latter goes on without them."""

import threading
from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.steps import GrammarOutput
from services.worker.runner import RanksLost

I32 = NDArray[np.int32]
KEPT_STEPS = 16
"""Prepared steps whose rows are kept; more are never in flight behind one."""


class MaskInbox:
    """Masks of launched steps. `take` belongs to the thread that samples, `close` to any, the rest to the main thread.

    A step without some of its masks waits as long as nobody else is held back. It is sampled without them when a later
    step is prepared that has a row of another request, or when so many are prepared that the main thread, which
    delivers masks, would wait for this step with the next one.

    Args:
        most_prepared: number of steps that wait for this one without holding back the main thread.
    """

    def __init__(self, most_prepared: int) -> None:
        self._most_prepared = most_prepared
        self._changed = threading.Condition()
        self._masks: dict[int, list[GrammarOutput]] = {}
        """Step id -> its masks, until the step is sampled."""
        self._prepared: deque[tuple[int, I32]] = deque(maxlen=KEPT_STEPS)
        """(step id, slots of its rows) of the latest prepared steps."""
        self._sampled = 0
        """The last step whose masks were taken."""
        self._closed = False

    def prepared(self, step_id: int, slots: I32) -> None:
        """A step was prepared; `slots` are those of its rows."""
        with self._changed:
            self._prepared.append((step_id, slots))
            self._changed.notify()

    def put(self, grammar: GrammarOutput) -> None:
        """Add masks. Those of a step that was sampled are dropped."""
        with self._changed:
            if grammar.step_id > self._sampled:
                self._masks.setdefault(grammar.step_id, []).append(grammar)
                self._changed.notify()

    def close(self) -> None:
        """End a wait: the epoch is over."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self, step_id: int, slots: I32) -> list[GrammarOutput]:
        """Return the masks that a step is sampled with; `slots` are those of its constrained rows.

        Raises: RanksLost, if the epoch ends meanwhile
        """
        with self._changed:
            while len(missing := self._missing(step_id, slots)) and not self._holds_back(step_id, missing):
                if self._closed:
                    raise RanksLost("the epoch has ended")
                self._changed.wait()
            self._sampled = step_id
            taken = self._masks.pop(step_id, [])
            for before in [known for known in self._masks if known < step_id]:
                del self._masks[before]
            return taken

    def _missing(self, step_id: int, slots: I32) -> I32:
        arrived = [unpack(grammar.slots) for grammar in self._masks.get(step_id, ())]
        return np.setdiff1d(slots, np.concatenate(arrived)) if arrived else slots

    def _holds_back(self, step_id: int, missing: I32) -> bool:
        """Return whether a later step would wait for the missing masks although it could begin."""
        later = list(self._later(step_id))
        return len(later) > self._most_prepared or any(len(np.setdiff1d(rows, missing)) for rows in later)

    def _later(self, step_id: int) -> Iterator[I32]:
        return (slots for prepared, slots in self._prepared if prepared > step_id)


def joined(parts: list[GrammarOutput]) -> GrammarOutput | None:
    """Return the masks of several messages of one step as one message; None: there are none."""
    if len(parts) < 2:
        return parts[0] if parts else None
    counts = [
        unpack(part.counts) if part.counts else np.ones(len(part.slots) // 4, np.int32) for part in parts
    ]
    return GrammarOutput(
        parts[0].epoch,
        parts[0].step_id,
        b"".join(part.slots for part in parts),
        memoryview(b"".join(bytes(part.bitmask) for part in parts)),
        np.concatenate(counts).tobytes(),
    )
