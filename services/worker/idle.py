"""Idleness of a process that loads: a hung one uses no processor time. Without a clock of its own."""

WORK = 0.1
"""Seconds of processor time that count as work; heartbeats alone use less within minutes."""


class IdleWatch:
    def __init__(self) -> None:
        self._work = 0.0
        self._since: float | None = None
        """When the last work was seen; None: nothing is measured."""

    def observe(self, work: float, now: float) -> None:
        """`work`: seconds of processor time so far; 0.0: not measured."""
        if not work:
            self._work, self._since = 0.0, None
        elif self._since is None or work - self._work >= WORK:
            self._work, self._since = work, now

    def seconds(self, now: float) -> float:
        """Return the seconds since the last work."""
        return 0.0 if self._since is None else now - self._since
