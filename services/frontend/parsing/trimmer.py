"""Text without the white space at its ends, while it grows."""


class Trimmer:
    def __init__(self, space: str = " \t\n\r") -> None:
        self._space = space
        self._held: list[str] = []

    def push(self, text: str, begun: bool) -> str:
        """Return the text up to the last character that is not white space.

        Args:
            begun: text was shown before, so that white space before this text belongs to it.
        """
        stripped = text.rstrip(self._space)
        if not stripped:
            self._held.append(text)
            return ""
        shown = self.flush() + stripped if begun else stripped.lstrip(self._space)
        self._held = [text[len(stripped) :]]
        return shown

    def flush(self) -> str:
        """Return the white space that was held back."""
        held, self._held = "".join(self._held), []
        return held
