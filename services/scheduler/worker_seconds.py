"""Seconds of the output rank by what it did, summed over steps."""

from protocol.steps import STEP_DURATIONS, StepTimes


class WorkerSeconds:
    """Sums since the start of the scheduler."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys((*STEP_DURATIONS, "busy", "forward", "sampling"), 0.0)

    def add(self, times: StepTimes) -> None:
        sums = self._sums
        for name in STEP_DURATIONS:
            sums[name] += getattr(times, name)
        sums["busy"] += times.sampled - times.forward_began
        sums["forward"] += times.forward_ended - times.forward_began
        sums["sampling"] += times.sampled - times.forward_ended

    def stats(self) -> dict[str, float]:
        """Return the sums by the names of their metrics."""
        return {f"worker_{name}_seconds_total": seconds for name, seconds in self._sums.items()}
