"""Compiled grammars, the most recently used ones, within a number of bytes."""

from collections import OrderedDict
from dataclasses import dataclass

from llguidance import LLMatcher

from protocol.sampling import GrammarKind
from services.scheduler.grammar.limits import CACHE_BYTES

Key = tuple[GrammarKind, str]
"""What a grammar was compiled from."""


@dataclass(slots=True)
class Compiled:
    matcher: LLMatcher
    """In its first state; requests get copies, which share its lexer."""
    num_bytes: int
    """By estimate: what the trial process measured for it and for one short answer, times the answers since."""
    growth: int
    """Bytes that one answer may add."""


class GrammarCache:
    """An entry that has grown to a quarter of the whole is dropped: its lexer has seen more states than are worth
    keeping, and the next request compiles it anew."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, Compiled] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def copy(self, key: Key) -> LLMatcher | None:
        """A matcher in its first state, or None. Whoever asks will use it for an answer."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.num_bytes += entry.growth
        self.num_bytes += entry.growth
        self._entries.move_to_end(key)
        copy = entry.matcher.deep_copy()
        self._shrink(key)
        return copy

    def put(self, key: Key, entry: Compiled) -> None:
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
