"""Tokens of one answer to its text. No I/O, no clock.

Text is returned only when it is certain: no incomplete characters, no part of a stop string, no text that may still
become one.
"""

from collections.abc import Collection
from dataclasses import dataclass

from services.frontend.text.detokenizer import Detokenizer


@dataclass
class StopFilter:
    """Passes text on up to the first stop string. Holds back an ending that could be the start of one."""

    _stops: list[str]
    _include: bool = False
    """Pass the stop string itself on too."""

    def __post_init__(self) -> None:
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is certain now; after a match always ""."""
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
        """Return the length of the longest ending of the held text that begins `stop`."""
        for size in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:size]):
                return size
        return 0

    def flush(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held


class TextAssembler:
    __slots__ = (
        "_detokenizer", "_filter", "_hidden", "_min_tokens", "has_stops", "num_chars", "num_tokens", "stop_string",
    )  # fmt: skip

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: list[str],
        min_tokens: int = 0,
        stop_token_ids: Collection[int] = (),
        include_stop: bool = False,
    ) -> None:
        """
        Args:
            stops: stop strings, searched in the text of the tokens after the first `min_tokens`.
            stop_token_ids: tokens that end the answer.
            include_stop: show the stop string or token that ended the answer.
        """
        self._detokenizer = detokenizer
        self._filter = StopFilter(stops, include_stop)
        self.has_stops = bool(stops)
        self._min_tokens = min_tokens
        self._hidden = frozenset(() if include_stop else stop_token_ids)
        self.num_tokens = 0
        self.num_chars = 0
        """Characters of all tokens so far, shown or not."""
        self.stop_string: str | None = None
        """The stop string that ended the answer."""

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that became certain. None follows one that completed a stop string."""
        self.num_tokens += 1
        if token_id in self._hidden:
            return ""
        text = self._detokenizer.push(token_id)
        self.num_chars += len(text)
        return self._filtered(text) if self.has_stops and self.num_tokens > self._min_tokens else text

    def _filtered(self, text: str) -> str:
        certain = self._filter.push(text)
        self.stop_string = self._filter.matched
        return certain

    def finish(self) -> str:
        """Return the text that was held back, when no more tokens follow."""
        return self._filtered(self._detokenizer.flush()) + self._filter.flush()
