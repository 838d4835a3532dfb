"""Reasoning between two tags."""

import enum
from dataclasses import dataclass

from services.frontend.parsing.events import Content, Reasoning, TextParser
from services.frontend.parsing.json_reader import next_word, pass_until
from services.frontend.parsing.text_buffer import ParseError, Parsing, Trimmer


@dataclass(frozen=True)
class ReasoningTags:
    """Texts around reasoning. Those of a kind begin with the same character, which does not occur again in them."""

    opening: tuple[str, ...] = ("<think>",)
    closing: tuple[str, ...] = ("</think>",)
    space: str = "\n"
    """White space beside the tags that belongs neither to the reasoning nor to the content."""


THINK = ReasoningTags()


class ReasoningStart(enum.Enum):
    """Start of an answer: inside or outside of the reasoning."""

    INSIDE = "inside"
    """The prompt has opened the reasoning, or the model always reasons."""
    OUTSIDE = "outside"
    """The prompt has closed the reasoning."""
    BY_TAG = "by tag"
    """Inside if the answer begins with the opening tag, else outside."""


def start_in_prompt(text: str, default: ReasoningStart, tags: ReasoningTags = THINK) -> ReasoningStart:
    """Return where an answer begins whose prompt ends with `text`."""
    end = text.rstrip()
    if end.endswith(tags.opening):
        return ReasoningStart.INSIDE
    return ReasoningStart.OUTSIDE if end.endswith(tags.closing) else default


def start_in_message(message: str, tags: ReasoningTags = THINK) -> ReasoningStart:
    """Return where an answer begins that continues `message`."""
    opened, closed = (max(map(message.rfind, words)) for words in (tags.opening, tags.closing))
    return ReasoningStart.INSIDE if opened > closed else ReasoningStart.OUTSIDE


class ThinkParser(TextParser):
    """Splits one answer."""

    def __init__(self, start: ReasoningStart, tags: ReasoningTags = THINK) -> None:
        self._start = start
        self._tags = tags
        super().__init__()

    def _read(self) -> Parsing[None]:
        buffer, inside, first = self._buffer, self._start is ReasoningStart.INSIDE, ""
        opening, closing = self._tags.opening, self._tags.closing
        closed = False
        if self._start is not ReasoningStart.OUTSIDE:
            buffer.keep()
            try:
                tag = yield from next_word(buffer, *opening, *(closing if inside else ()))
                inside, closed = True, tag in closing
            except ParseError:
                first = buffer.kept()
            buffer.drop_kept()
        if inside:
            if not closed:
                yield from self._inside(first)
            first = ""
            while (char := (yield from buffer.peek())) and char in self._tags.space:
                buffer.skip()
        self._add(Content(first))
        while (yield from buffer.peek()):
            self._add(Content(buffer.rest()))

    def _inside(self, first: str) -> Parsing[None]:
        """Read up to and with the closing tag, or to the end of the text."""
        trimmer = Trimmer(self._tags.space)
        self._add(Reasoning(trimmer.push(first)))
        yield from pass_until(self._buffer, self._tags.closing, lambda text: self._add(Reasoning(trimmer.push(text))))

    def _add(self, event: Content | Reasoning) -> None:
        if event.text:
            self._events.append(event)
