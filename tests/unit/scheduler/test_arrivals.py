"""The order of arrival, and the leadership that ends with silence."""

import sys

from services.scheduler.core.request import make_order_key
from services.scheduler.leadership import Leadership


def test_older_requests_come_first_and_all_before_new_ones() -> None:
    ages = (0.0, 0.5, 20.0, 1e9, sys.float_info.max)
    new, young, old, ancient, oldest = (make_order_key(0, number, age) for number, age in enumerate(ages))
    later = make_order_key(0, len(ages))
    assert ancient < oldest < old < young < new < later < make_order_key(1, 0, 20.0)
    assert ancient < make_order_key(0, len(ages), 1e9) < old, "equal ages in the order in which they were sent"


def test_a_scheduler_that_did_not_run_for_long_has_lost_its_place() -> None:
    leadership = Leadership(10.0, 1000.0)
    assert leadership.lost(1009.0, replaced=False) is None
    leadership.on_sign_of_life(1009.0)
    assert leadership.lost(1019.0, replaced=False) is None, "the others have heard it within the limit"
    why = leadership.lost(1020.5, replaced=False)
    assert why is not None
    assert "did not run for 11.5 s" in why


def test_a_scheduler_that_was_stopped_before_its_first_turn_has_lost_its_place() -> None:
    assert Leadership(10.0, 1000.0).lost(1011.0, replaced=False) is not None


def test_a_scheduler_whose_socket_was_replaced_has_lost_its_place() -> None:
    leadership = Leadership(10.0, 1000.0)
    why = leadership.lost(1000.0, replaced=True)
    assert why is not None
    assert "another scheduler" in why
