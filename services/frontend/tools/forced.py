"""Calls that the request requires: a grammar makes the model write them as JSON in these forms."""

from services.frontend.parsing.text_buffer import Parsing
from services.frontend.tools.parser import MAX_HELD, ToolParser


class RequiredParser(ToolParser):
    """`[{"name": ..., "parameters": {...}}, ...]`"""

    def _read(self) -> Parsing[None]:
        self._buffer.keep(MAX_HELD)
        yield from self._attempt(self._list())
        yield from self._rest()


class NamedParser(ToolParser):
    """Only the arguments, of the one tool that may be called."""

    def _read(self) -> Parsing[None]:
        self._buffer.keep(MAX_HELD)
        yield from self._attempt(self._arguments_only())
        yield from self._rest()

    def _arguments_only(self) -> Parsing[None]:
        (name,) = self._names
        yield from self._object(name)
        self._end()
