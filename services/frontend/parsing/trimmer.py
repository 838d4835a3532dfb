"""Text without the white space at its ends, while it grows."""


class Trimmer:
    def __init__(self, space: str = " \t\n\r") -> None:
        self._space = space
        self._held: list[str] = []

    def push(self, text: str, begun: bool) -> str:
        """What is certain to be shown: up to the last character that is no space. `begun`: the space before it, too."""
        stripped = text.rstrip(self._space)
        if not stripped:
            self._held.append(text)
            return ""
        shown = self.flush() + stripped if begun else stripped.lstrip(self._space)
        self._held = [text[len(stripped) :]]
        return shown

    def flush(self) -> str:
        held, self._held = "".join(self._held), []
        return held
