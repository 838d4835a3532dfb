"""The table of an engine's conditions."""

from itertools import product

import pytest

from services.frontend.placement import Condition, ConditionEvent, IllegalCondition, condition_after
from services.frontend.placement.engine_states import CONDITIONS, MAY_SERVE, MOVES_STREAMS


@pytest.mark.parametrize(("condition", "event"), list(product(Condition, ConditionEvent)))
def test_every_event_has_a_row_or_is_refused(condition: Condition, event: ConditionEvent) -> None:
    if (condition, event) in CONDITIONS:
        assert condition_after(condition, event) is CONDITIONS[condition, event]
        return
    with pytest.raises(IllegalCondition, match=f"{event.name} has no place while an engine is {condition.name}"):
        condition_after(condition, event)


def test_only_a_message_that_it_serves_makes_an_engine_ready() -> None:
    for (before, event), after in CONDITIONS.items():
        assert after is not Condition.READY or event is ConditionEvent.SERVE, (before, event)


def test_a_drained_engine_is_resumed_or_lost_and_a_lost_one_connects_again() -> None:
    leaves = {(before, event) for (before, event), after in CONDITIONS.items() if after is not before}
    assert {event for before, event in leaves if before is Condition.DRAINING} == {
        ConditionEvent.RESUME,
        ConditionEvent.LOSE,
    }
    assert {event for before, event in leaves if before is Condition.GONE} == {ConditionEvent.CONNECT}


def test_streams_move_from_engines_that_get_no_requests() -> None:
    assert Condition.READY not in (*MOVES_STREAMS, *MAY_SERVE)
    assert Condition.SILENT not in MOVES_STREAMS
    assert Condition.DRAINING not in MAY_SERVE
