"""The condition of an engine follows from what its scheduler has sent last."""

from collections import deque

from protocol.media import MediaModel
from protocol.requests import EnginePhase, EngineState
from services.frontend.engine.availability import RECOVERY_GRACE, Availability
from services.frontend.placement import Condition

PHASES = EnginePhase.READY, EnginePhase.DRAINING, EnginePhase.LOADING, EnginePhase.RECOVERING
READY, DRAINING, LOADING, RECOVERING = map(EngineState, PHASES)


def test_condition_through_doubt_drains_and_losses() -> None:
    engine, seen = Availability("0", 10.0, deque()), list[Condition]()

    def drain(draining: bool) -> None:
        engine.draining = draining

    seen.append(engine.condition)
    for event in (
        lambda: engine.on_state(READY, 1.0),
        lambda: engine.on_doubt(2.0),
        lambda: drain(True),
        lambda: drain(False),  # still in doubt
        lambda: engine.on_state(READY, 3.0),
        lambda: engine.on_state(DRAINING, 4.0),
        lambda: engine.on_doubt(5.0),
        lambda: engine.on_lost(6.0),
        lambda: drain(True),
        lambda: engine.on_state(LOADING, 7.0),
        lambda: drain(False),
        lambda: engine.on_state(READY, 8.0),
        lambda: engine.on_state(RECOVERING, 9.0),
        lambda: engine.check_workers(9.0 + RECOVERY_GRACE),
        lambda: engine.on_state(RECOVERING, 9.0 + RECOVERY_GRACE),
        lambda: engine.check_workers(9.1 + RECOVERY_GRACE),
        lambda: engine.on_doubt(16.0),
        lambda: engine.on_state(RECOVERING, 17.0),
        lambda: engine.on_state(READY, 18.0),
        lambda: engine.on_state(RECOVERING, 19.0),
    ):
        event()
        seen.append(engine.condition)
    assert [str(condition) for condition in seen] == [
        "connecting", "ready", "silent", "draining", "silent", "ready", "draining", "draining", "gone", "gone",
        "draining", "connecting", "ready", "connecting", "connecting", "connecting", "recovering", "silent",
        "recovering", "ready", "connecting",
    ]  # fmt: skip


def test_a_frontend_that_drains_waits_for_no_engine_that_was_stopped() -> None:
    stopped, running, replaced = [DRAINING], [READY], [DRAINING, READY]
    for states, is_stopping, patience in (
        (stopped, True, 0.0), (stopped, False, 10.0), (running, True, 10.0), (replaced, True, 10.0)
    ):  # fmt: skip
        engine = Availability("0", 10.0, deque())
        for state in states:
            engine.on_state(state, 1.0)
            engine.on_lost(2.0)
        engine.on_lost(2.1)
        assert not engine.gives_up(2.0 + patience, is_connected=False, is_stopping=is_stopping)
        given_up = [engine.gives_up(2.1 + patience, is_connected=False, is_stopping=is_stopping) for _ in range(2)]
        assert given_up == [True, False]


def test_an_engine_that_is_lost_runs_no_requests() -> None:
    engine, totals = Availability("0", 10.0, deque()), {"steps_total": 9.0, "kv_tier_hit_tokens_total:host": 2.0}
    gauges = {"num_requests_waiting_by_reason:capacity": 3.0, "kv_tier_bytes:host": 1.0}
    engine.on_state(EngineState(EnginePhase.READY, stats=totals | gauges, pids=[7], media=MediaModel("float32")), 1.0)
    engine.on_lost(2.0)
    assert (engine.state.stats, engine.state.pids) == (totals, [])
    engine.on_state(LOADING, 3.0)
    assert engine.state.media is not None, "requests that wait for it are checked against what it served"
