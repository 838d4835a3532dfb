"""The order of arrival, and the rights and duties that end with silence."""

import sys

from services.scheduler.core.arrivals import Arrivals
from services.scheduler.core.request import ARRIVAL_BITS
from services.scheduler.leases import Leadership, Leases


def test_older_requests_come_first_and_all_before_new_ones() -> None:
    arrivals = Arrivals(lambda: ())
    new, young, old, ancient, oldest = (arrivals.next(age) for age in (0.0, 0.5, 20.0, 1e9, sys.float_info.max))
    later = arrivals.next(0.0)
    assert ancient < oldest < old < young < new < later < 1 << ARRIVAL_BITS


def test_equal_ages_keep_the_order_in_which_they_were_sent() -> None:
    arrivals = Arrivals(lambda: ())
    numbers = [arrivals.next(3.0) for _ in range(1000)]
    assert numbers == sorted(set(numbers))


def test_numbers_of_open_requests_are_unique_and_those_of_ended_ones_are_swept() -> None:
    """More of one age than there are numbers between two ages, many of which stay open."""
    open_numbers: dict[int, None] = {}
    arrivals = Arrivals(lambda: open_numbers)
    for count in range(100_000):
        number = arrivals.next(3.0)
        assert number not in open_numbers
        open_numbers[number] = None
        if count % 2:
            del open_numbers[number if count % 3 else next(iter(open_numbers))]
        while len(open_numbers) > 5000:
            del open_numbers[next(iter(open_numbers))]
    assert len(arrivals.taken) <= 2 * 5001


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


def test_a_lease_ends_without_a_sign_of_life_and_is_renewed_by_any_message() -> None:
    leases = Leases(10.0)
    leases.renew(1, 0.0)  # it has never sent a sign of life
    leases.grant(2, 0.0)
    leases.grant(3, 0.0)
    leases.renew(3, 5.0)
    assert leases.expired(12.0) == [2]
    leases.end(2)
    assert leases.expired(12.0) == []
