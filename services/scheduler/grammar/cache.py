"""Least-recently-used cache of compiled grammars, bounded in bytes."""

from collections import OrderedDict
from dataclasses import dataclass

from llguidance import LLMatcher

from protocol.sampling import GrammarKind
from services.scheduler.grammar.limits import CACHE_BYTES

Key = tuple[GrammarKind, str]
"""Kind and text of the request's grammar."""


@dataclass(slots=True)
class CompiledGrammar:
    matcher: LLMatcher
    """In its initial state. Requests get copies, which share its lexer."""
    num_bytes: int
    """Estimate: the size that the trial process measured, plus `growth` for each output since."""
    growth: int
    """Bytes that one output may add to the shared lexer."""


class GrammarCache:
    """Cache of compiled grammars.

    An entry that has grown to a quarter of the limit is dropped, because its lexer has collected many states; the next
    request compiles the grammar again.
    """

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, CompiledGrammar] = OrderedDict()

    def copy(self, key: Key) -> LLMatcher | None:
        """Return a matcher in its initial state for one output, or None. The entry grows by one output."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.num_bytes += entry.growth
        self.num_bytes += entry.growth
        self._entries.move_to_end(key)
        copy = entry.matcher.deep_copy()
        self._shrink(key)
        return copy

    def put(self, key: Key, entry: CompiledGrammar) -> None:
        self.drop(key)
        self._entries[key] = entry
        self.num_bytes += entry.num_bytes
        self._shrink(key)

    def drop(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes

    def _shrink(self, grown: Key) -> None:
        if 4 * self._entries[grown].num_bytes > self._max_bytes:
            self.drop(grown)
        while self.num_bytes > self._max_bytes:
            self.drop(next(iter(self._entries)))
