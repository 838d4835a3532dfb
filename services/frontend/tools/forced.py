"""Calls that the request requires: a grammar makes the model write them as JSON in these forms."""

from services.frontend.parsing.text_buffer import Parsing
from services.frontend.tools.parser import ToolParser


class RequiredParser(ToolParser):
    """`[{"name": ..., "parameters": {...}}, ...]`"""

    may_be_bare = True

    def _calls(self, marker: str) -> Parsing[None]:
        return self._list()


class NamedParser(ToolParser):
    """Only the arguments, of the one tool that may be called."""

    may_be_bare = True

    def _calls(self, marker: str) -> Parsing[None]:
        (name,) = self._names
        yield from self._object(name)
        self._end()
