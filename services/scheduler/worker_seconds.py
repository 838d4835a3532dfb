"""Seconds of the output rank by what it did, summed over steps."""

from protocol.steps import STEP_DURATIONS, StepTimes


class WorkerSeconds:
    """Sums since the start of the scheduler."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys((*STEP_DURATIONS, "busy", "forward", "sampling"), 0.0)
        self._new: list[StepTimes] = []
        """Times that are not in the sums yet."""

    def add(self, times: StepTimes) -> None:
        self._new.append(times)

    def stats(self) -> dict[str, float]:
        """Return the sums by the names of their metrics. Call it regularly."""
        sums, new, self._new = self._sums, self._new, []
        for times in new:
            for name in STEP_DURATIONS:
                sums[name] += getattr(times, name)
            sums["busy"] += times.sampled - times.forward_began
            sums["forward"] += times.forward_ended - times.forward_began
            sums["sampling"] += times.sampled - times.forward_ended
        return {f"worker_{name}_seconds_total": seconds for name, seconds in self._sums.items()}
