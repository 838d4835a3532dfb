"""Seconds of the output rank by what it did, summed over steps."""

from protocol.steps import STEP_DURATIONS, StepTimes


class WorkerSeconds:
    """Sums since the start of the scheduler."""

    def __init__(self) -> None:
        self.last_forward = 0.0
        """Seconds of the last forward pass."""
        self._next_end = self._transit = 0.0
        self._sums = dict.fromkeys((*STEP_DURATIONS, "busy", "forward", "sampling"), 0.0)

    def add(self, times: StepTimes, clock_offset: float, now: float) -> None:
        """Add a step.

        Args:
            clock_offset: seconds to subtract from `times` to get this process's time.
            now: when its result was received.
        """
        sums, self.last_forward = self._sums, times.forward_ended - times.forward_began
        for name in STEP_DURATIONS:
            sums[name] += getattr(times, name)
        sums["busy"] += times.sampled - times.forward_began
        sums["forward"] += self.last_forward
        sums["sampling"] += times.sampled - times.forward_ended

        self._next_end = times.forward_ended - clock_offset + self.last_forward
        self._transit = now - (times.sent - clock_offset)

    def arrives_in_time(self, sent: float) -> bool:
        """Return whether a message that is sent at `sent` arrives before the forward pass that follows the last known
        one ends, if the two take equally long and there is no gap between them."""
        return sent + self._transit < self._next_end

    def stats(self) -> dict[str, float]:
        """Return the sums by the names of their metrics."""
        return {f"worker_{name}_seconds_total": seconds for name, seconds in self._sums.items()}
