"""Seconds of the output rank by what it did, summed over steps."""

from protocol.steps import StepTimes


class WorkerSeconds:
    """Sums since the start of the scheduler."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(
            ("idle", "busy", "forward", "sampling", "plan_wait", "prepared_wait", "forward_gap"), 0.0
        )

    def add(self, times: StepTimes) -> None:
        sums = self._sums
        sums["idle"] += times.idle
        sums["busy"] += times.sampled - times.forward_began
        sums["forward"] += times.forward_ended - times.forward_began
        sums["sampling"] += times.sampled - times.forward_ended
        sums["plan_wait"] += times.plan_wait
        sums["prepared_wait"] += times.prepared_wait
        sums["forward_gap"] += times.forward_gap

    def stats(self) -> dict[str, float]:
        """Return the sums by the names of their metrics."""
        return {f"worker_{name}_seconds_total": seconds for name, seconds in self._sums.items()}
