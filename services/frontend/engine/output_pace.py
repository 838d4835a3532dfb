"""Speed of an engine's streams, from the totals that its scheduler reports. No clock."""

from collections.abc import Mapping

WINDOW = 1.0
"""Seconds over which the speed is averaged, at least."""


class OutputPace:
    """Mean time between two output tokens of a stream. A stall counts with its length, unless prompts are computed."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """0.0: unknown."""
        self._begin: tuple[float, float, float] | None = None
        """Time, output tokens and prompt tokens at the begin of the window."""

    def on_stats(self, stats: Mapping[str, float], now: float) -> None:
        """The scheduler has reported. `now`: monotonic seconds."""
        running = stats.get("num_requests_running", 0.0)
        outputs, prompts = stats.get("generation_tokens", 0.0), stats.get("prompt_tokens", 0.0)
        if not running or self._begin is None or outputs < self._begin[1]:
            self.seconds, self._begin = 0.0, (now, outputs, prompts)
            return
        since, outputs_before, prompts_before = self._begin
        if now - since < WINDOW:
            return
        if outputs > outputs_before:
            self.seconds = running * (now - since) / (outputs - outputs_before)
        elif prompts == prompts_before:
            self.seconds = max(self.seconds, now - since)
            return
        self._begin = now, outputs, prompts
