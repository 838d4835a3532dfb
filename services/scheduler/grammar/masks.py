"""Token masks of a request's next row: made at once, or on a thread beside the scheduler's loop.

A grammar moves only when its request emits a token, and a token is emitted only after the masks before it were made. So
the thread that makes masks and the scheduler's loop never use a grammar at the same time.
"""

import os
import queue
import threading
import time
from collections import deque
from typing import NamedTuple
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from protocol.silence import SIGN_INTERVAL
from services.scheduler.grammar.base import Grammar
from services.scheduler.grammar.threads import LoopWakeup, deep_stacks

FAILPOINT = "RUNAHEAD_FAILPOINT_MASK_SECONDS"
WAKE_INTERVAL = 1e-3
"""Seconds. Masks that are made within it are sent together, if more are to be made."""
QUICK = 5e-4
"""Seconds. Masks that took no longer are made in the loop the next time."""
LONGEST = SIGN_INTERVAL / 2
"""Seconds that `wait` takes at most: the scheduler's signs of life wait meanwhile."""
Masks = NDArray[np.int32]
"""int32[masks, ceil(vocab / 32)]"""


def make_masks(grammar: Grammar, draft_ids: list[int], num_words: int) -> Masks:
    """Return the mask of the next token, and one more for each position that drafts within the grammar lead to (draft
    masks, docs/invariants.md)."""
    masks = np.empty((1 + len(draft_ids), num_words), np.int32)
    if not draft_ids:
        grammar.fill(masks[0])
        return masks
    return masks[: grammar.look_ahead(draft_ids, masks)]


class InlineMaskMaker:
    """A `MaskMaker` that makes masks at once."""

    late = False

    def submit(self, ticket: int, grammar: Grammar, draft_ids: list[int], num_words: int) -> Masks | None:
        return make_masks(grammar, draft_ids, num_words)


INLINE_MASKS = InlineMaskMaker()


class _Job(NamedTuple):
    ticket: int
    grammar: Grammar
    draft_ids: list[int]
    num_words: int


class MaskThread:
    """A `MaskMaker` that holds the scheduler's loop up for a bounded time only.

    `wait` makes the masks of grammars whose last mask was quick: another thread would have to take turns with the loop
    for the interpreter's lock and for a core. All other masks are made by a thread, which starts with the first one.
    llguidance releases the lock while it computes. The public methods belong to the scheduler's thread. An error of a
    mask is raised by `wait` or `take`.

    Args:
        quick: seconds of a quick mask.

    RUNAHEAD_FAILPOINT_MASK_SECONDS is for tests and benchmarks: it makes all masks that many seconds late.
    """

    late = True

    def __init__(self, quick: float = QUICK) -> None:
        self._quick_seconds = quick
        self._jobs: queue.SimpleQueue[tuple[list[_Job], float] | None] = queue.SimpleQueue()
        """For the thread, in lists, each of which wakes it once, with the time of the last submission."""
        self._quick_jobs: deque[_Job] = deque()
        """For `wait`."""
        self._pace = quick
        """Mean seconds of the last quick masks."""
        self._quick: WeakSet[Grammar] = WeakSet()
        """Grammars whose last masks were quick."""
        self._delay = float(os.environ.get(FAILPOINT) or 0)
        self._made: deque[tuple[_Job, Masks | Exception, float]] = deque()
        """Made by the thread, each with the seconds that it took."""
        self._ready: list[tuple[int, Masks]] = []
        """Made by `wait`."""
        self._num_open = 0
        """Masks that were submitted and not taken."""
        self._submitted = 0.0
        """Time of the last submission, or of the first one of quick masks that follow one another."""
        self._closed = False
        self._thread: threading.Thread | None = None
        self._wakeup = LoopWakeup()

    def fileno(self) -> int:
        """Return a file descriptor that is readable when there is a result for `take`."""
        return self._wakeup.fileno()

    def submit(self, ticket: int, grammar: Grammar, draft_ids: list[int], num_words: int) -> Masks | None:
        self._num_open += 1
        job = _Job(ticket, grammar, draft_ids, num_words)
        if self._delay or grammar not in self._quick:
            self._submitted = time.monotonic()
            self._hand_over([job])
            return None
        if not self._quick_jobs:
            self._submitted = time.monotonic()
            self._wakeup.set()  # the loop must not sleep before `wait`
        self._quick_jobs.append(job)
        return None

    def _hand_over(self, jobs: list[_Job]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="masks", daemon=True)
            with deep_stacks():
                self._thread.start()
        self._jobs.put((jobs, self._submitted))

    @property
    def seconds_needed(self) -> float:
        """Seconds that `wait` needs for the quick masks."""
        return len(self._quick_jobs) * self._pace

    def wait(self, patience: float, most: float) -> None:
        """Make quick masks for `most` seconds; the thread makes the rest. Then wait until no mask is being made: for
        `patience` seconds from the last submission on, and for up to `most` seconds while masks are made so fast that
        the missing ones take twice as long at most. At most `LONGEST` in all."""
        most = min(most, LONGEST)
        self._make_quick(time.monotonic() + most)  # a plan may have been sent since they were submitted
        if self._quick_jobs:
            self._hand_over([*self._quick_jobs])
            self._quick_jobs.clear()
        while (missing := self._num_open - (made := len(self._made) + len(self._ready))) > 0:
            now = time.monotonic()
            fast = missing * (now - self._submitted) <= 2 * made * most
            if (left := self._submitted + (most if fast else patience) - now) <= 0:
                return
            self._wakeup.wait(left)
            self._wakeup.clear()

    def _make_quick(self, deadline: float) -> None:
        """Make quick masks, and begin none after `deadline`."""
        began = ended = time.monotonic()
        before = len(self._ready)
        while self._quick_jobs and ended < deadline:
            ticket, grammar, draft_ids, num_words = self._quick_jobs.popleft()
            started = ended
            self._ready.append((ticket, make_masks(grammar, draft_ids, num_words)))
            ended = time.monotonic()
            if ended - started > self._quick_seconds:
                self._quick.discard(grammar)
        if made := len(self._ready) - before:
            self._pace = (ended - began) / made

    def take(self) -> list[tuple[int, Masks]]:
        """Return each result once: (ticket, masks)."""
        self._wakeup.clear()
        taken, self._ready = self._ready, []
        while self._made:
            job, made, seconds = self._made.popleft()
            if isinstance(made, Exception):
                raise made
            (self._quick.add if seconds <= self._quick_seconds else self._quick.discard)(job.grammar)
            taken.append((job.ticket, made))
        self._num_open -= len(taken)
        return taken

    def close(self) -> None:
        """End the thread when the mask that it makes is ready. Others are not made any more."""
        self._closed = True
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()
        self._wakeup.close()

    def _run(self) -> None:
        """Make masks. The scheduler's loop is woken when none is left to be made, and every `WAKE_INTERVAL`."""
        woken = 0.0
        while (handed_over := self._jobs.get()) is not None:
            jobs, submitted = handed_over
            for job in jobs:
                if self._closed:
                    return
                if self._delay:
                    time.sleep(max(0.0, submitted + self._delay - time.monotonic()))
                started = time.monotonic()
                try:
                    masks: Masks | Exception = make_masks(job.grammar, job.draft_ids, job.num_words)
                except Exception as error:  # the scheduler's thread raises it
                    masks = error
                ended = time.monotonic()
                self._made.append((job, masks, ended - started))
                if (job is jobs[-1] and self._jobs.empty()) or ended - woken > WAKE_INTERVAL:
                    woken = ended
                    self._wakeup.set()
