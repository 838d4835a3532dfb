"""Matching state of one request's output, by llguidance."""

import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from ctypes import addressof, c_char

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from services.scheduler.grammar.errors import row_limit
from services.scheduler.grammar.limits import MAX_FILL_SECONDS, MAX_WHITESPACE, STACK_BYTES
from services.scheduler.grammar.whitespace import Whitespace

log = logging.getLogger("runahead.scheduler.grammar")


class Matcher:
    """Implementation of `Grammar`.

    It fails for good if a token does not match, if no token may follow, or if a mask takes too long. After a failure
    every mask has all bits set and no token is accepted.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        library_eos: tuple[int, ...],
        eos_token_ids: tuple[int, ...] = (),
        begins_after: tuple[int, ...] = (),
        whitespace: Whitespace | None = None,
    ) -> None:
        """
        Args:
            matcher: in its initial state, used by nothing else.
            library_eos: end-of-sequence tokens of llguidance's tokenizer, at least one.
            eos_token_ids: end-of-sequence tokens of the request; empty: those of the tokenizer.
            begins_after: every token is allowed until these tokens were emitted in this order.
            whitespace: bound on whitespace, for a JSON output.
        """
        self.matcher = matcher
        self._library_eos = library_eos[0]
        self._eos = frozenset(eos_token_ids or library_eos)
        self._other_eos = frozenset(library_eos) - self._eos
        """End-of-sequence tokens of the tokenizer that the request does not have."""
        self._translates_eos = self._eos != frozenset(library_eos)
        self._begins_after = begins_after
        self._tail: deque[int] = deque(maxlen=len(begins_after))
        self._waits = bool(begins_after)
        self._whitespace = whitespace
        self._num_blank = 0
        """Whitespace tokens at the end of the output."""
        self._ended = self._failed = self._suspect = False

    def accept(self, token_id: int) -> bool:
        if self._failed or self._ended:
            return not self._failed
        if self._waits:
            self._tail.append(token_id)
            self._waits = tuple(self._tail) != self._begins_after
            return True
        self._ended = token_id in self._eos
        known = self._library_eos if self._ended else token_id
        self._failed = token_id in self._other_eos or not self.matcher.consume_token(known)
        if self._failed:
            self._log_failure("the token does not match it")
        if self._whitespace is not None:
            self._num_blank = self._num_blank + 1 if token_id in self._whitespace.token_ids else 0
        return not self._failed

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Raises: ValueError, if the mask is not contiguous or its size is not that of the vocabulary."""
        if not mask.flags.c_contiguous:
            raise ValueError("a mask must be contiguous")
        self.complete(mask, self.constrains and self._compute(mask))

    @property
    def constrains(self) -> bool:
        """False: every token may come next."""
        return not (self._failed or self._ended or self._waits)

    def complete(self, mask: NDArray[np.int32], too_slow: bool = False) -> None:
        """Make the library's mask that of the request."""
        if self.constrains:
            if too_slow or self.matcher.is_error():
                self._failed = True
                self._log_failure(f"a mask took more than {MAX_FILL_SECONDS:g} s" if too_slow else "no token matches")
            if self._translates_eos:
                self._translate_eos(mask)
                self._failed |= not mask.any()
            if self._num_blank >= MAX_WHITESPACE and self._whitespace is not None:
                self._whitespace.forbid(mask)
        if not self.constrains:
            mask[:] = -1

    def look_ahead(self, token_ids: list[int], masks: NDArray[np.int32]) -> int:
        """Raises: ValueError, as `fill` does."""
        self.fill(masks[0])
        tail, waits, blank, suspect = self._tail.copy(), self._waits, self._num_blank, self._suspect
        consumed, filled, failed = 0, 1, self._failed
        for token in () if failed or self._ended else token_ids:
            if token < 0 or token in self._eos or not _allows(masks[filled - 1], token):
                break
            consumed += not self._waits
            self.accept(token)
            self.fill(masks[filled])
            if self._failed:
                break
            filled += 1
        if consumed:
            self.matcher.rollback(consumed)
        self._tail, self._waits, self._num_blank, self._suspect = tail, waits, blank, suspect
        self._failed = failed or self.matcher.is_error()
        return filled

    def _log_failure(self, why: str) -> None:
        """Log the cause. llguidance's own text may quote the grammar."""
        log.warning("an output cannot be kept within its grammar: %s", row_limit(self.matcher.get_error()) or why)

    def _compute(self, mask: NDArray[np.int32]) -> bool:
        """Let llguidance fill the mask. Return whether that took too long.

        The clock of processor time may cost more than a mask, so it is read only after one mask was slow by the wall
        clock; that one may have waited for a processor.
        """
        clock = time.thread_time if self._suspect else time.perf_counter
        started = clock()
        # `mask.ctypes` costs more than a mask; llguidance checks the size.
        self.matcher.unsafe_compute_mask_ptr(addressof(c_char.from_buffer(mask.data)), mask.nbytes)
        slow, was_suspect = clock() - started > MAX_FILL_SECONDS, self._suspect
        self._suspect = slow or was_suspect
        return slow and was_suspect

    def _translate_eos(self, mask: NDArray[np.int32]) -> None:
        """Replace the tokenizer's end-of-sequence tokens in the mask by those of the request."""
        bits = mask.view(np.uint32)
        may_end = bits[self._library_eos // 32] >> np.uint32(self._library_eos % 32) & 1
        for token in self._other_eos:
            bits[token // 32] &= ~np.uint32(1 << token % 32)
        for token in self._eos:
            bit = np.uint32(1 << token % 32)
            bits[token // 32] = bits[token // 32] | bit if may_end else bits[token // 32] & ~bit


def _allows(mask: NDArray[np.int32], token: int) -> bool:
    return token < 32 * len(mask) and bool(int(mask[token // 32]) >> token % 32 & 1)


class MatcherBatch:
    """Fills the masks of several matchers with one call of the library, which needs the interpreter's lock only to
    begin and to end. No mask of it counts as too slow."""

    def __init__(self) -> None:
        os.environ["RUST_MIN_STACK"] = str(4 * STACK_BYTES)  # of the library's threads, as in `deep_stacks`
        # Workers on the same machine need the other cores.
        self._executor = LLExecutor(num_threads=max(1, (os.cpu_count() or 1) // 4))

    def fill(self, matchers: Sequence[Matcher], masks: NDArray[np.int32]) -> None:
        """Fill `masks`, int32[matchers, ceil(vocab / 32)], contiguous, as `Matcher.fill` does."""
        computed = [(matcher.matcher, row) for row, matcher in enumerate(matchers) if matcher.constrains]
        if computed:  # the library refuses an empty list
            self._executor.unsafe_compute_mask_ptr(computed, masks.ctypes.data, masks.strides[0], len(masks))
        for matcher, mask in zip(matchers, masks, strict=True):
            matcher.complete(mask)
