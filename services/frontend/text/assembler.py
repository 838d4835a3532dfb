"""One answer as it grows: tokens in, text out. No I/O, no clock.

Text goes out only when it is certain: no half characters, nothing of a stop string, nothing that may still become one.
"""

from collections.abc import Collection

from services.frontend.text.detokenizer import Detokenizer


class OutOfOrder(Exception):
    """A token's index is ahead of what this answer has: something was lost."""


class StopFilter:
    """Passes text on up to the first stop string; holds back an ending that could be the start of one."""

    def __init__(self, stops: list[str], include: bool = False) -> None:
        """`include`: the stop string itself is shown too."""
        self._stops = stops
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now; after a match nothing more."""
        if not self._stops or self.matched is not None:
            return text if self.matched is None else ""
        self._held += text
        found = [(at, -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, _, self.matched = min(found)
            certain = self._held[: at + len(self.matched) if self._include else at]
            self._held = ""
            return certain
        keep = max(map(self._overlap, self._stops))
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return certain

    def _overlap(self, stop: str) -> int:
        """Length of the longest ending of the held text that begins `stop`."""
        for size in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:size]):
                return size
        return 0

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class Answer:
    """Assembles one choice."""

    __slots__ = (
        "_detokenizer",
        "_filter",
        "_has_stops",
        "_hidden",
        "_min_tokens",
        "duplicates",
        "num_chars",
        "num_tokens",
        "stop_string",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: list[str],
        min_tokens: int = 0,
        ends: Collection[int] = (),
        include_stop: bool = False,
    ) -> None:
        """`stops` are looked for in the text of the tokens after the first `min_tokens`. `ends` are the tokens that
        end the answer. What ended it is shown only with `include_stop`."""
        self._detokenizer = detokenizer
        self._filter = StopFilter(stops, include_stop)
        self._has_stops = bool(stops)
        self._min_tokens = min_tokens
        self._hidden = frozenset(() if include_stop else ends)
        self.num_tokens = 0
        self.num_chars = 0
        """Of the text of all tokens so far, shown or not."""
        self.duplicates = 0
        self.stop_string: str | None = None
        """The one that ended it."""

    def push(self, index: int, token_id: int) -> str:
        """Takes the token with this index; lower ones were delivered before and are dropped.

        Raises: OutOfOrder
        """
        if index != self.num_tokens or self.stop_string is not None:
            return self._unexpected(index)
        self.num_tokens = index + 1
        if token_id in self._hidden:
            return ""
        text = self._detokenizer.push(token_id)
        self.num_chars += len(text)
        return self._filtered(text) if self._has_stops and self.num_tokens > self._min_tokens else text

    def _unexpected(self, index: int) -> str:
        """Raises: OutOfOrder"""
        if self.stop_string is None:
            if index > self.num_tokens:
                raise OutOfOrder(f"token {index} arrived, {self.num_tokens} was expected")
            self.duplicates += 1
        return ""

    def _filtered(self, text: str) -> str:
        certain = self._filter.push(text)
        self.stop_string = self._filter.matched
        return certain

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        return self._filtered(self._detokenizer.flush()) + self._filter.flush()
