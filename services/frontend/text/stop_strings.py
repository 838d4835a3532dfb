"""Stop strings in a text that grows."""


class StopFilter:
    """Passes text on up to the first stop string. Holds back an ending that could be the start of one."""

    def __init__(self, stops: list[str], include: bool = False) -> None:
        """
        Args:
            include: pass the stop string itself on too.
        """
        self._stops = stops
        self._include = include
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
