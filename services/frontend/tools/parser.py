"""Base of the parsers of tool calls.

A call that is never completed is content, as written, unless the request requires calls. An eager parser returns a call
as soon as its name is known and its arguments begin. Returned events cannot be revoked: if such a call breaks later,
its returned part stays and the rest is content. White space around calls is dropped.
"""

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

from services.frontend.parsing.events import Arguments, CallStart, Content, ParsedEvent, TextParser
from services.frontend.parsing.json_reader import check_value, next_word, pass_until, read_text, read_value, read_word
from services.frontend.parsing.text_buffer import ParseError, Parsing, Trimmer
from services.frontend.tools.schema import MAX_NAME, NAME_PATTERN, list_format

MAX_HELD = 65_536
"""Maximum characters of a call before its arguments, or of arguments that precede the name."""
NAME = re.compile(NAME_PATTERN)
_SPACE = " \t\n\r"
_HIGH, _LOW = r"\\u[dD][89abAB]\w\w", r"\\u[dD][c-fC-F]\w\w"
_COMPLETE = re.compile(rf"(?:[^\\]+|\\[^u]|{_HIGH}(?:{_LOW}|(?=[^\\]|\\[^u]|\\u\w{{4}}))|(?!{_HIGH})\\u\w{{4}})*")
"""Text up to an escape, or a surrogate pair, that may be cut off."""
_ESCAPE = re.compile(rf"({_HIGH}{_LOW}|(?!{_HIGH}|{_LOW})\\.)|{_HIGH}|{_LOW}", re.DOTALL)
"""An escape of JSON; one of half a surrogate pair, which a client cannot send back, is in no group."""
_ARGUMENTS = ("arguments", "parameters")
_BESIDE_NAME = ("type", "id")


class ToolParser(TextParser):
    """Finds the calls in one answer."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Texts that the format writes around calls. They may be special tokens, which the text lacks by default."""
    openings: ClassVar[tuple[str, ...]] = ()
    """Texts before a call, or before several; (): nothing marks any."""
    closings: ClassVar[tuple[str, ...]] = ()
    """Texts behind a call that the reader of calls leaves to the content. All of both begin with the same character,
    which does not occur again in them."""
    may_be_bare: ClassVar[bool] = False
    """True: an answer may begin with calls that nothing marks."""
    listed: ClassVar[str | None] = None
    """Text before a list of calls, of formats that a grammar writes like that."""
    is_for_all_answers: ClassVar[bool] = False
    """True: the format has marks around all text, so that answers without tools are parsed, too."""

    def __init__(
        self,
        names: frozenset[str],
        eager: bool,
        max_calls: int | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            names: the tools that may be called.
            eager: return a call before it is complete.
            max_calls: calls beyond this number are dropped. 0, for answers without calls: also incomplete ones.
            parameters: JSON schema of each tool's arguments, for formats that write values without their types.
        """
        self._parameters = parameters or {}
        self._names = names
        self._eager = eager
        self._max_calls = max_calls
        self.num_calls = 0
        """Complete calls."""
        self._num_arguments = 0
        self._index = 0
        """Index of the call that is being read, or of the next one."""
        self._pending: list[ParsedEvent] | None = None
        """Events of the call that is being read, until it is complete; an eager parser keeps none back.

        None until the name is known and the arguments begin.
        """
        self._arguments_from: int | None = None
        """Position in the last chunk where the arguments begin that were not returned."""
        self._held = ""
        """The beginning of an escape, or of a surrogate pair, at their end."""
        self._trimmer = Trimmer()
        self._has_calls = False
        self._is_after_call = False
        """True while only white space has followed a complete call."""
        super().__init__()

    @classmethod
    def grammar(cls, tools: Mapping[str, Any], max_calls: int | None) -> dict[str, Any] | None:
        """Return the calls of these tools as a format of structural tags; None, if the format has no grammar.

        Args:
            tools: JSON schema of each tool's arguments.

        Raises: APIError, if a schema is nested too deeply
        """
        return None if cls.listed is None else list_format(cls.listed, tools, max_calls)

    def _read(self) -> Parsing[None]:
        yield from self._answer()
        if not self._has_calls and (space := self._trimmer.flush()):
            self._events.append(Content(space))

    def _answer(self) -> Parsing[None]:
        """Parse the format up to the end of the text."""
        if self.may_be_bare:
            self._buffer.keep(MAX_HELD)
            yield from self._attempt(self._calls(""))
        if not self.openings:
            while (yield from self._buffer.peek()):
                self._content(self._buffer.rest())
            return
        while marker := (yield from self._content_until(*self.openings, *self.closings)):
            if marker in self.openings:
                yield from self._attempt(self._calls(marker))
            elif self._is_after_call:
                self._is_after_call = False
                self._buffer.drop_kept()
            else:
                self._break()

    def _calls(self, marker: str) -> Parsing[None]:
        """Read what follows an opening; "": calls that nothing marks, whose names must be known in a format that also
        marks calls. By default they are in an array. Raises: ParseError"""
        return self._list(strict=not marker and bool(self.openings))

    def _id(self) -> str:
        """Return a unique id for a call."""
        return f"chatcmpl-tool-{uuid.uuid4().hex}"

    # Parts of formats.

    def _content(self, text: str) -> None:
        if shown := self._trimmer.push(text, keeps_begin=not self._has_calls):
            self._events.append(Content(shown))
            self._is_after_call = False

    def _content_until(self, *markers: str) -> Parsing[str]:
        """Read content up to one of `markers`; return the marker, "" at the end of the text.

        All markers begin with the same character, which does not occur again in them.
        """
        buffer, first = self._buffer, markers[0][0]
        while True:
            self._content(buffer.until(first))
            char = yield from buffer.peek()
            if not char:
                return ""
            if char != first:
                continue
            buffer.keep(MAX_HELD)
            try:
                return (yield from read_word(buffer, *markers))
            except ParseError:
                self._break()

    def _attempt(self, parsing: Parsing[None]) -> Parsing[None]:
        """Run a parser of calls; if the text does not match, the kept text that was not returned is content."""
        try:
            yield from parsing
        except ParseError:
            self._break()
        self._buffer.drop_kept()

    def _break(self) -> None:
        self._emit_arguments()
        if self._pending is not None and self._eager:
            self._index += 1
        self._content(self._buffer.kept())
        self._pending = self._arguments_from = None
        self._buffer.drop_kept()

    def _call(self, strict: bool = False) -> Parsing[None]:
        """Read a call as an object with its name and its arguments. Raises: ParseError

        Args:
            strict: the name must be a known one and stand at the beginning, as nothing else marks this as a call.
        """
        buffer, name, held = self._buffer, "", ""
        yield from next_word(buffer, "{")
        while True:
            yield from buffer.past_space()
            key = yield from read_text(buffer)
            yield from next_word(buffer, ":")
            yield from buffer.past_space()
            if key == "name" and not name:
                name = yield from self._name(strict)
                if held:
                    self._start(name, held)
            elif key in _ARGUMENTS and not held and self._pending is None:
                held = yield from self._arguments(name)
            elif strict and not name and key not in _BESIDE_NAME:
                raise ParseError
            else:
                yield from read_value(buffer)
            if (yield from next_word(buffer, ",", "}")) == "}":
                break
        if self._pending is None:
            raise ParseError
        self._end()

    def _list(self, strict: bool = False) -> Parsing[None]:
        """Read calls in an array. Raises: ParseError; the calls that were completed before remain"""
        yield from next_word(self._buffer, "[")
        while True:
            yield from self._call(strict)
            self._buffer.keep(MAX_HELD)
            if (yield from next_word(self._buffer, ",", "]")) == "]":
                break

    def _name(self, strict: bool) -> Parsing[str]:
        name = yield from read_text(self._buffer, 6 * MAX_NAME)  # escapes such as \u0041
        if NAME.fullmatch(name) is None or (strict and name not in self._names):
            raise ParseError
        return name

    def _arguments(self, name: str) -> Parsing[str]:
        """Read an object, or a string that holds one; return it if the name is not known yet. Raises: ParseError"""
        buffer = self._buffer
        if (yield from buffer.peek()) == '"':
            text = (yield from read_text(buffer)).strip(_SPACE)
            if not text.startswith("{"):
                raise ParseError
            check_value(text)
        elif name:
            yield from self._object(name)
            return ""
        else:
            if (yield from buffer.peek()) != "{":
                raise ParseError
            before = len(buffer.kept())
            yield from read_value(buffer)
            text = buffer.kept()[before:]
        if name:
            self._start(name, text)
        return text

    def _object(self, name: str) -> Parsing[None]:
        """Read arguments, which are returned as they arrive. Raises: ParseError"""
        if (yield from self._buffer.past_space()) != "{":
            raise ParseError
        self._start(name)
        self._arguments_from, self._held = self._buffer.position, ""
        for _ in read_value(self._buffer):  # it needs more text
            self._emit_arguments()
            yield
            self._arguments_from = self._buffer.position
        self._emit_arguments()
        self._arguments_from = None

    def _until(self, word: str) -> Parsing[str]:
        """Read the text up to and with `word`, whose first character does not occur again in it; return the text
        before. Raises: ParseError, if the text ends first"""
        parts: list[str] = []
        if not (yield from pass_until(self._buffer, [word], parts.append)):
            raise ParseError
        return "".join(parts)

    def _short(self, word: str) -> Parsing[str]:
        """Read a name up to and with `word`; return it without white space around it. Raises: ParseError"""
        buffer, text = self._buffer, ""
        while (char := (yield from buffer.peek())) and len(text) <= MAX_NAME + 8:
            if char == word[0]:
                yield from read_word(buffer, word)
                return text.strip(_SPACE)
            buffer.skip()
            text += char
        raise ParseError

    def _start_object(self, name: str) -> None:
        """Start a call whose arguments are added one by one. Raises: ParseError, if no tool can have this name"""
        if NAME.fullmatch(name) is None:
            raise ParseError
        self._start(name, "{")
        self._num_arguments = 0
        self._mark()

    def _add_argument(self, key: str, value: str) -> None:
        """Add an argument; `value` is JSON."""
        separator = ", " if self._num_arguments else ""
        self._num_arguments += 1
        self._emit(Arguments(self._index, f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}"))
        self._mark()

    def _end_object(self) -> None:
        self._emit(Arguments(self._index, "}"))
        self._end()

    def _mark(self) -> None:
        """Keep the text from here on: what an eager parser has read, but not returned."""
        if self._eager:
            self._buffer.keep()

    def _start(self, name: str, arguments: str = "") -> None:
        if self._eager:
            self._buffer.drop_kept()
            self._has_calls = True
        self._buffer.lift_budget()
        self._pending = []
        self._emit(CallStart(self._index, self._id(), name))
        if arguments:
            self._emit(Arguments(self._index, arguments))

    def _emit(self, event: ParsedEvent) -> None:
        if self._pending is None or (self._max_calls is not None and self._index >= self._max_calls):
            return
        if isinstance(event, Arguments) and "\\u" in event.text:
            event = Arguments(event.index, _ESCAPE.sub(lambda found: found[1] or "\\ufffd", event.text))
        (self._events if self._eager else self._pending).append(event)

    def _emit_arguments(self) -> None:
        if self._arguments_from is None:
            return
        text = self._held + self._buffer.since(self._arguments_from)
        self._arguments_from = self._buffer.position
        text, self._held = text[: (end := _COMPLETE.match(text).end())], text[end:]  # type: ignore[union-attr]
        if text:
            self._emit(Arguments(self._index, text))

    def _end(self) -> None:
        """Complete the call."""
        self._events += self._pending or []
        self._pending = None
        self._index += 1
        self.num_calls += 1
        self._has_calls = self._is_after_call = True
        self._buffer.drop_kept()
