"""Seconds of the output rank by what it did, summed over steps."""

from operator import attrgetter, sub

from protocol.steps import STEP_DURATIONS, StepTimes

_MOMENTS = [*map(attrgetter, ("forward_began", "forward_ended", "sampled"))]


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
        for name in STEP_DURATIONS:
            sums[name] += sum(map(attrgetter(name), new))
        began, ended, sampled = ([*map(moment, new)] for moment in _MOMENTS)
        sums["busy"] += sum(map(sub, sampled, began))
        sums["forward"] += sum(map(sub, ended, began))
        sums["sampling"] += sum(map(sub, sampled, ended))
        return {f"worker_{name}_seconds_total": seconds for name, seconds in self._sums.items()}
