"""Grammar masks of launched steps, and when a step is sampled without them.

The rule is that of the left-out row (docs/invariants.md).
"""

import math
import threading
from collections import deque
from typing import NamedTuple

import numpy as np

from protocol.codec import unpack
from protocol.columns import I32
from protocol.steps import GrammarOutput
from services.worker.backends.clock import MONOTONIC, Clock
from services.worker.runner import RanksLost

KEPT_STEPS = 16
"""Prepared steps whose rows are kept; more are never in flight behind one."""
MOST_SKIPPED = 63
"""Steps that do not wait after several waits in vain."""


class Forward(NamedTuple):
    """A forward pass: seconds on the clock."""

    began: float
    ended: float


ENDLESS = Forward(0.0, math.inf)
"""All masks are waited for."""


class TakenMasks(NamedTuple):
    """The masks that a step is sampled with."""

    parts: list[GrammarOutput]
    left_out: frozenset[int]
    """Slots of the constrained rows without masks."""
    at: float
    """When it was decided to sample with these: seconds on the clock."""


class _Prepared(NamedTuple):
    step_id: int
    slots: I32
    """Slots of its rows."""
    at: float
    """Seconds on the clock."""


class MaskInbox:
    """Masks of launched steps. `take` belongs to the thread that samples, `close` to any, the rest to the main thread,
    which calls `poll` instead of `take` if it samples as well.

    A step without some of its masks waits as long as nobody else is held back. It is sampled without them when its
    forward pass has ended and a later step is prepared, if one of the two has a row of another request, or when so many
    are prepared that the main thread, which delivers masks, would wait for this step with the next one.

    No later step can be prepared before the scheduler has the results of this one's rows of other requests. So a step
    with such rows waits only as long as that costs fewer tokens than to leave rows out: the wait delays all rows, while
    a row that is left out loses a forward pass. If that was in vain, 1, 3, 7 and at most `MOST_SKIPPED` such steps do
    not wait, until masks come in time again. For a row that was left out before, they wait without this limit: its
    masks may be sent directly behind each plan, and always come too late. All this begins when a plan came before the
    masks of an earlier step: other schedulers (at depth one, or with the policy `phased`) expect all rows.

    Args:
        most_prepared: number of steps that wait for this one without holding back the main thread.
    """

    def __init__(self, most_prepared: int, clock: Clock = MONOTONIC) -> None:
        self._most_prepared, self._clock = min(most_prepared, KEPT_STEPS - 1), clock
        self._changed = threading.Condition()
        self._masks: dict[int, list[GrammarOutput]] = {}
        """Step id -> its masks, until the step is sampled."""
        self._arrived: dict[int, float] = {}
        """Step id -> when the last of them arrived."""
        self._prepared: deque[_Prepared] = deque(maxlen=KEPT_STEPS)
        """The latest prepared steps."""
        self._vain_waits = self._skipped = 0
        """Waits in vain since the last one that was not; steps that do not wait any more."""
        self._left_out: frozenset[int] = frozenset()
        """Slots whose last row was left out."""
        self._runs_ahead = False
        """A plan came before the masks of an earlier step, which only a scheduler sends that allows rows to be left out
        (deferred sampling)."""
        self._closed = False

    def prepared(self, step_id: int, slots: I32) -> None:
        """A step was prepared; `slots` are those of its rows."""
        with self._changed:
            self._prepared.append(_Prepared(step_id, slots, self._clock.monotonic()))
            self._changed.notify()

    def put(self, grammar: GrammarOutput) -> None:
        """Add masks. Those of a step that was sampled are dropped with the next one."""
        with self._changed:
            self._masks.setdefault(grammar.step_id, []).append(grammar)
            self._arrived[grammar.step_id] = self._clock.monotonic()
            self._changed.notify()

    def close(self) -> None:
        """End a wait: the epoch is over."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self, step_id: int, slots: I32, forward: Forward) -> TakenMasks:
        """Return the masks that a step is sampled with; `slots` are those of its constrained rows.

        Raises: RanksLost, if the epoch ends meanwhile
        """
        with self._changed:
            while isinstance(taken := self.poll(step_id, slots, forward), float):
                if self._closed:
                    raise RanksLost("the epoch has ended")
                self._clock.wait(self._changed, taken - self._clock.monotonic() if taken < math.inf else None)
            return taken

    def poll(self, step_id: int, slots: I32, forward: Forward) -> TakenMasks | float:
        """`take` without waiting. If the step waits, return until when: seconds on the clock."""
        waiting = frozenset(slots.tolist())
        with self._changed:
            decided = self._decided(step_id, waiting, forward)
            if decided > self._clock.monotonic():
                return decided
            return self._taken(step_id, waiting, forward, decided)

    def _taken(self, step_id: int, waiting: frozenset[int], forward: Forward, decided: float) -> TakenMasks:
        """Return the masks of a step, and drop those of steps before."""
        left_out = self._missing(step_id, waiting)
        self._left_out = self._left_out - waiting | left_out
        if not left_out:
            if decided > forward.ended:
                self._vain_waits = 0
        elif self._skipped:
            self._skipped -= 1
        else:
            self._vain_waits += 1
            self._skipped = min(2**self._vain_waits - 1, MOST_SKIPPED)
        taken = self._masks.pop(step_id, [])
        self._arrived.pop(step_id, None)
        for before in [known for known in self._masks if known < step_id]:
            del self._masks[before], self._arrived[before]
        return TakenMasks(taken, left_out, decided)

    def _missing(self, step_id: int, waiting: frozenset[int]) -> frozenset[int]:
        """Return the slots of `waiting` whose masks have not arrived."""
        # Sets of so few numbers are much faster than NumPy's set operations
        return waiting.difference(*(unpack(part.slots).tolist() for part in self._masks.get(step_id, ())))

    def _decided(self, step_id: int, waiting: frozenset[int], forward: Forward) -> float:
        """Return the time from which the step is sampled with the masks that have arrived; inf: it waits.

        Args:
            waiting: slots of the step's constrained rows.
        """
        missing = self._missing(step_id, waiting)
        self._runs_ahead |= bool(missing and self._prepared and self._prepared[-1].step_id > step_id)
        held_back = max(forward.ended, self._held_back(step_id, missing or waiting, forward))
        # Complete masks that were read late, as the host was busy, cost no more than leaving their rows out
        return held_back if missing else min(self._arrived.get(step_id, 0.0), held_back)

    def _held_back(self, step_id: int, waiting: frozenset[int], forward: Forward) -> float:
        """Return since when rows of other requests, in this step or in a later one that could begin, wait too long for
        the masks of `waiting`; inf: none does."""
        later, others, limit = 0, False, math.inf
        for prepared in self._prepared:
            if prepared.step_id < step_id:
                continue
            others = others or not waiting.issuperset(prepared.slots.tolist())
            if prepared.step_id > step_id:
                later += 1
                if others or later > self._most_prepared:
                    return min(prepared.at, limit)
            elif others and self._runs_ahead and waiting.isdisjoint(self._left_out):
                share = 0.0 if self._skipped else len(waiting) / len(prepared.slots)
                limit = forward.ended + share * (forward.ended - forward.began)
        return limit


def joined(parts: list[GrammarOutput]) -> GrammarOutput | None:
    """Return the masks of several messages of one step as one message; None: there are none."""
    if len(parts) < 2:
        return parts[0] if parts else None
    counts = [unpack(part.counts) if part.counts else np.ones(len(part.slots) // 4, np.int32) for part in parts]
    return GrammarOutput(
        parts[0].epoch,
        parts[0].step_id,
        b"".join(part.slots for part in parts),
        memoryview(b"".join(bytes(part.bitmask) for part in parts)),
        np.concatenate(counts).tobytes(),
    )
