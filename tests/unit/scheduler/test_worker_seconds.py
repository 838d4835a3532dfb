"""The sums of the output rank's time."""

from protocol.steps import StepTimes
from services.scheduler.worker_seconds import WorkerSeconds


def test_sums_of_steps() -> None:
    seconds = WorkerSeconds()
    for start in (100.0, 200.0):
        seconds.add(
            StepTimes(
                forward_began=start,
                forward_ended=start + 2,
                sampled=start + 3,
                idle=0.5,
                plan_wait=0.75,
                prepared_wait=0.25,
                forward_gap=1.5,
            )
        )
    assert seconds.stats() == {
        "worker_idle_seconds_total": 1.0,
        "worker_busy_seconds_total": 6.0,
        "worker_forward_seconds_total": 4.0,
        "worker_sampling_seconds_total": 2.0,
        "worker_plan_wait_seconds_total": 1.5,
        "worker_prepared_wait_seconds_total": 0.5,
        "worker_forward_gap_seconds_total": 3.0,
    }
