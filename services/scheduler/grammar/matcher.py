"""The state of one request's output, by llguidance."""

import time
from collections import deque
from ctypes import addressof, c_char

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from services.scheduler.grammar.limits import MAX_FILL_SECONDS, MAX_WHITESPACE
from services.scheduler.grammar.whitespace import Whitespace


class Matcher:
    """A `Grammar`. It fails for good when a token does not match, when nothing may follow any more, or when to find out
    what may follow takes too long; then every bit is set and the next token is not accepted."""

    def __init__(
        self,
        matcher: LLMatcher,
        ends: tuple[int, ...],
        eos_token_ids: tuple[int, ...] = (),
        begins_after: tuple[int, ...] = (),
        whitespace: Whitespace | None = None,
    ) -> None:
        """
        Args:
            matcher: in its first state; nobody else's.
            ends: the EOS tokens that the library knows, at least one.
            eos_token_ids: those of the request; empty: the same.
            begins_after: nothing is constrained until these were emitted in this order.
            whitespace: bounds whitespace where the answer is JSON.
        """
        self._matcher = matcher
        self._end = ends[0]
        self._ends = frozenset(eos_token_ids or ends)
        self._foreign = frozenset(ends) - self._ends
        self._renamed = self._ends != frozenset(ends)
        self._begins_after = begins_after
        self._tail: deque[int] = deque(maxlen=len(begins_after))
        self._waits = bool(begins_after)
        self._whitespace = whitespace
        self._num_blank = 0
        """Tokens of nothing but whitespace at the end of the output."""
        self._ended = self._failed = self._suspect = False

    def accept(self, token_id: int) -> bool:
        if self._failed or self._ended:
            return not self._failed
        if self._waits:
            self._tail.append(token_id)
            self._waits = tuple(self._tail) != self._begins_after
            return True
        self._ended = token_id in self._ends
        known = self._end if self._ended else token_id
        self._failed = token_id in self._foreign or not self._matcher.consume_token(known)
        if self._whitespace is not None:
            self._num_blank = self._num_blank + 1 if token_id in self._whitespace.token_ids else 0
        return not self._failed

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Raises: ValueError, if the mask is not contiguous or of another size than the model's."""
        if not mask.flags.c_contiguous:
            raise ValueError("a mask must be contiguous")
        if not (self._failed or self._ended or self._waits):
            self._failed = self._takes_too_long(mask) or self._matcher.is_error()
            if self._renamed:
                self._rename(mask)
                self._failed |= not mask.any()
            if self._whitespace is not None and self._num_blank >= MAX_WHITESPACE:
                self._whitespace.forbid(mask)
        if self._failed or self._ended or self._waits:
            mask[:] = -1

    def look_ahead(self, token_ids: list[int], masks: NDArray[np.int32]) -> int:
        """Raises: ValueError, like `fill`."""
        self.fill(masks[0])
        tail, waits, blank, suspect = self._tail.copy(), self._waits, self._num_blank, self._suspect
        consumed, filled, failed = 0, 1, self._failed
        for token in () if failed or self._ended else token_ids:
            if token < 0 or token in self._ends or not _allows(masks[filled - 1], token):
                break
            consumed += not self._waits
            self.accept(token)
            self.fill(masks[filled])
            if self._failed:
                break
            filled += 1
        if consumed:
            self._matcher.rollback(consumed)
        self._tail, self._waits, self._num_blank, self._suspect = tail, waits, blank, suspect
        self._failed = failed or self._matcher.is_error()
        return filled

    def _takes_too_long(self, mask: NDArray[np.int32]) -> bool:
        """Asks the library, and whether it took more processor time than it may. To read that clock may itself cost
        more than a mask does: only once a mask was slow by the wall's is it read."""
        clock = time.thread_time if self._suspect else time.perf_counter
        started = clock()
        # `mask.ctypes` costs more than the mask; the library checks the size.
        self._matcher.unsafe_compute_mask_ptr(addressof(c_char.from_buffer(mask.data)), mask.nbytes)
        slow, was_suspect = clock() - started > MAX_FILL_SECONDS, self._suspect
        self._suspect = slow or was_suspect
        return slow and was_suspect

    def _rename(self, mask: NDArray[np.int32]) -> None:
        """The request's ends for those that the library knows."""
        bits = mask.view(np.uint32)
        may_end = bits[self._end // 32] >> np.uint32(self._end % 32) & 1
        for token in self._foreign:
            bits[token // 32] &= ~np.uint32(1 << token % 32)
        for token in self._ends:
            bit = np.uint32(1 << token % 32)
            bits[token // 32] = bits[token // 32] | bit if may_end else bits[token // 32] & ~bit


def _allows(mask: NDArray[np.int32], token: int) -> bool:
    return token < 32 * len(mask) and bool(int(mask[token // 32]) >> token % 32 & 1)
