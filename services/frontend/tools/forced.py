"""What a grammar makes the model write when a call is demanded: JSON, in a form of our own choice."""

from services.frontend.parsing.text_buffer import Reading
from services.frontend.tools.parser import MAX_HELD, ToolParser


class RequiredParser(ToolParser):
    """`[{"name": ..., "parameters": {...}}, ...]`"""

    def _read(self) -> Reading[None]:
        self._feed.keep(MAX_HELD)
        yield from self._attempt(self._list())
        yield from self._rest()


class NamedParser(ToolParser):
    """The arguments alone, of the one tool on offer."""

    def _read(self) -> Reading[None]:
        self._feed.keep(MAX_HELD)
        yield from self._attempt(self._only())
        yield from self._rest()

    def _only(self) -> Reading[None]:
        (name,) = self._names
        yield from self._object(name)
        self._end()
