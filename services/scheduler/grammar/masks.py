"""Token masks of a request's next row: made at once, or on a thread beside the scheduler's loop.

A grammar moves only when its request emits a token, and a token is emitted only after the masks before it were made. So
the thread that makes masks and the scheduler's loop never use a grammar at the same time.
"""

import os
import queue
import threading
import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

from services.scheduler.grammar.base import Grammar
from services.scheduler.grammar.threads import LoopWakeup, start_thread

FAILPOINT = "RUNAHEAD_FAILPOINT_MASK_SECONDS"
WAKE_INTERVAL = 1e-3
"""Seconds. Masks that are made within it are sent together, if more are to be made."""
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


class MaskThread:
    """A `MaskMaker` with a thread of its own, which starts with the first mask. llguidance releases the interpreter's
    lock while it computes. The public methods belong to the scheduler's thread. An error of the thread is raised by
    `take`.

    RUNAHEAD_FAILPOINT_MASK_SECONDS is for tests and benchmarks: it makes all masks that many seconds late.
    """

    late = True

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[float, int, Grammar, list[int], int] | None] = queue.SimpleQueue()
        """Each with the time of its submission."""
        self._delay = float(os.environ.get(FAILPOINT) or 0)
        self._made: deque[tuple[int, Masks | Exception]] = deque()
        self._num_open = 0
        """Masks that were submitted and not taken."""
        self._submitted = 0.0
        """Time of the last submission."""
        self._closed = False
        self._thread: threading.Thread | None = None
        self._wakeup = LoopWakeup()

    def fileno(self) -> int:
        """Return a file descriptor that is readable when there is a result for `take`."""
        return self._wakeup.fileno()

    def submit(self, ticket: int, grammar: Grammar, draft_ids: list[int], num_words: int) -> Masks | None:
        if self._thread is None:
            self._thread = start_thread(self._run, "masks")
        self._num_open += 1
        self._submitted = time.monotonic()
        self._jobs.put((self._submitted, ticket, grammar, draft_ids, num_words))
        return None

    def wait(self, patience: float, most: float) -> None:
        """Wait until no mask is being made: for `patience` seconds from the last submission on, and for up to `most`
        seconds while masks are made so fast that the missing ones take twice as long at most."""
        while (missing := self._num_open - (made := len(self._made))) > 0:
            now = time.monotonic()
            fast = missing * (now - self._submitted) <= 2 * made * most
            if (left := self._submitted + (most if fast else patience) - now) <= 0:
                return
            self._wakeup.wait(left)
            self._wakeup.clear()

    def take(self) -> list[tuple[int, Masks]]:
        """Return each result once: (ticket, masks)."""
        self._wakeup.clear()
        taken = []
        while self._made:
            ticket, made = self._made.popleft()
            if isinstance(made, Exception):
                raise made
            taken.append((ticket, made))
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
        while (job := self._jobs.get()) is not None and not self._closed:
            submitted, ticket, grammar, draft_ids, num_words = job
            if self._delay:
                time.sleep(max(0.0, submitted + self._delay - time.monotonic()))
            try:
                self._made.append((ticket, make_masks(grammar, draft_ids, num_words)))
            except Exception as error:  # the scheduler's thread raises it
                self._made.append((ticket, error))
            if self._jobs.empty() or time.monotonic() - woken > WAKE_INTERVAL:
                woken = time.monotonic()
                self._wakeup.set()
