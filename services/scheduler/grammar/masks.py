"""Token masks of a request's next row: made at once, or on a thread beside the scheduler's loop.

A grammar moves only when its request emits a token, and a token is emitted only after the masks before it were made. So
the thread that makes masks and the scheduler's loop never use a grammar at the same time.
"""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from services.scheduler.grammar.base import Grammar
from services.scheduler.grammar.threads import LoopWakeup, deep_stacks

FAILPOINT = "RUNAHEAD_FAILPOINT_MASK_SECONDS"
WAKE_INTERVAL = 1e-3
"""Seconds. Masks that are made within it are sent together, if more are to be made."""
QUICK = 5e-4
"""Seconds. Masks that took no longer are made together with others the next time."""
IN_LOOP = 1.5e-3
"""Seconds. Masks that take longer together are made beside the loop. To hand them over and to take turns for the
interpreter's lock delays them by up to a millisecond."""
Masks = NDArray[np.int32]
"""int32[masks, ceil(vocab / 32)]"""
FillMasks = Callable[[Sequence[Any], Masks], None]
"""Fills int32[grammars, words], a mask for the next token of each grammar."""


def make_masks(grammar: Grammar, draft_ids: list[int], num_words: int) -> Masks:
    """Return the mask of the next token, and one more for each position that drafts within the grammar lead to (draft
    masks, docs/invariants.md)."""
    masks = np.empty((1 + len(draft_ids), num_words), np.int32)
    if not draft_ids:
        grammar.fill(masks[0])
        return masks
    return masks[: grammar.look_ahead(draft_ids, masks)]


def fill_each(grammars: Sequence[Grammar], masks: Masks) -> None:
    for grammar, mask in zip(grammars, masks, strict=True):
        grammar.fill(mask)


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

    A few masks of grammars whose last one was quick are made in the loop. More of them are made together on a thread
    beside it, by one call of the library, which releases the interpreter's lock while it computes. All others are made
    by the thread one by one. Time in which others have the processor makes no mask slow. The thread starts with the
    first mask. The public methods belong to the scheduler's thread. An error of a mask is raised by `take`.

    Args:
        fill: as `fill_each`, perhaps faster.
        quick: seconds of a quick mask.

    RUNAHEAD_FAILPOINT_MASK_SECONDS is for tests and benchmarks: it makes all masks that many seconds late.
    """

    late = True

    def __init__(self, fill: FillMasks = fill_each, quick: float = QUICK) -> None:
        self._fill, self._quick_seconds = fill, quick
        self._jobs: queue.SimpleQueue[tuple[list[_Job], float] | None] = queue.SimpleQueue()
        """For the thread: masks to be made together, with the time of their submission."""
        self._submitted: list[_Job] = []
        """Quick ones, for `take`."""
        self._pace = quick
        """Mean seconds of the last quick masks."""
        self._quick: WeakSet[Grammar] = WeakSet()
        """Grammars whose last masks were quick."""
        self._delay = float(os.environ.get(FAILPOINT) or 0)
        self._made: deque[tuple[list[_Job], list[Masks] | Exception, float]] = deque()
        """Made together, each with the seconds that they took."""
        self._woken = 0.0
        """Time at which the loop was woken last."""
        self._closed = False
        self._thread: threading.Thread | None = None
        self._wakeup = LoopWakeup()

    def fileno(self) -> int:
        """Return a file descriptor that is readable when there is something to `take`."""
        return self._wakeup.fileno()

    def submit(self, ticket: int, grammar: Grammar, draft_ids: list[int], num_words: int) -> Masks | None:
        job = _Job(ticket, grammar, draft_ids, num_words)
        if self._delay or grammar not in self._quick:
            self._hand_over([job])
        else:
            if not self._submitted:
                self._wakeup.set()  # the loop must not sleep before `take`
            self._submitted.append(job)
        return None

    def _hand_over(self, jobs: list[_Job]) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="masks", daemon=True)
            try:
                with deep_stacks():
                    thread.start()
            except RuntimeError:  # the system has no thread for this process now; the next masks may get one
                self._make(jobs)
                return
            self._thread = thread
        self._jobs.put((jobs, time.monotonic()))

    def take(self) -> list[tuple[int, Masks]]:
        """Return each result once: (ticket, masks). The quick masks that were submitted are made now."""
        self._wakeup.clear()
        taken = self._make_in_loop()
        while self._made:
            jobs, made, seconds = self._made.popleft()
            if isinstance(made, Exception):
                raise made
            self._judge(jobs, seconds)
            taken += [(job.ticket, masks) for job, masks in zip(jobs, made, strict=True)]
        return taken

    def _make_in_loop(self) -> list[tuple[int, Masks]]:
        """Make the quick masks that were submitted, if they take `IN_LOOP` together. Let the thread make those that are
        left when this time has passed, because some have become slow."""
        jobs, self._submitted = self._submitted, []
        taken: list[tuple[int, Masks]] = []
        if jobs and len(jobs) * self._pace <= IN_LOOP:
            began = now = time.thread_time()  # others may have the processor or the lock meanwhile
            all_quick = True
            for ticket, grammar, draft_ids, num_words in jobs:
                if now - began > IN_LOOP:
                    break
                taken.append((ticket, make_masks(grammar, draft_ids, num_words)))
                before, now = now, time.thread_time()
                if now - before > self._quick_seconds:
                    self._quick.discard(grammar)
                    all_quick = False
            if all_quick:
                self._pace += ((now - began) / len(taken) - self._pace) / 4
        if len(taken) < len(jobs):
            self._hand_over(jobs[len(taken) :])
        return taken

    def _judge(self, jobs: list[_Job], seconds: float) -> None:
        """Note which grammars are quick. One that is not would delay all masks that are made together with it. Only
        masks that are made alone raise the pace, or a grammar might become slower step by step among others."""
        pace = seconds / len(jobs)
        quick = seconds <= self._quick_seconds + 2 * self._pace * (len(jobs) - 1)
        if quick and (len(jobs) == 1 or pace < self._pace):
            self._pace += (pace - self._pace) / 4
        for job in jobs:
            (self._quick.add if quick else self._quick.discard)(job.grammar)

    def close(self) -> None:
        """End the thread when the masks that it makes are ready. Others are not made any more."""
        self._closed = True
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()
        self._wakeup.close()

    def _run(self) -> None:
        while (handed_over := self._jobs.get()) is not None:
            jobs, submitted = handed_over
            if self._closed:
                return
            if self._delay:
                time.sleep(max(0.0, submitted + self._delay - time.monotonic()))
            self._make(jobs)

    def _make(self, jobs: list[_Job]) -> None:
        """Make masks together. The scheduler's loop is woken when no more are to be made, and every `WAKE_INTERVAL`."""
        started, used = time.monotonic(), time.process_time()
        made: list[Masks] | Exception
        try:
            made = self._masks(jobs)
        except Exception as error:  # the scheduler's thread raises it
            made = error
        ended = time.monotonic()
        seconds = min(ended - started, time.process_time() - used)  # other processes may have had the processor
        self._made.append((jobs, made, seconds))
        if self._jobs.empty() or ended - self._woken > WAKE_INTERVAL:
            self._woken = ended
            self._wakeup.set()

    def _masks(self, jobs: list[_Job]) -> list[Masks]:
        if len(jobs) == 1 or any(job.draft_ids for job in jobs):
            return [make_masks(job.grammar, job.draft_ids, job.num_words) for job in jobs]
        masks = np.empty((len(jobs), jobs[0].num_words), np.int32)
        self._fill([job.grammar for job in jobs], masks)
        return [*masks[:, None]]
