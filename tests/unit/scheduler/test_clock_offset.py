"""The offset between two clocks, computed from exchanges with known delays."""

import pytest

from services.scheduler.io.workers import WINDOW, ClockOffset

AHEAD = 1000.0
"""Seconds by which the peer's clock is ahead."""


def exchange(clock: ClockOffset, sent: float, there: float, held: float, back: float, ahead: float = AHEAD) -> None:
    """One exchange whose messages travel for `there` and `back` seconds and wait `held` seconds at the peer."""
    arrived = sent + there
    clock.add(sent, arrived + ahead, arrived + held + ahead, arrived + held + back)


def test_equal_delays_give_the_exact_offset_however_long_the_peer_holds_the_message() -> None:
    clock = ClockOffset()
    assert clock.seconds == 0.0
    exchange(clock, sent=5.0, there=0.002, held=3.0, back=0.002)
    assert clock.seconds == pytest.approx(AHEAD, abs=1e-9)


def test_the_shortest_round_trip_of_the_window_counts() -> None:
    clock = ClockOffset()
    exchange(clock, sent=1.0, there=0.500, held=0.0, back=0.001)  # waited in a queue on its way there
    assert clock.seconds == pytest.approx(AHEAD + 0.2495)
    exchange(clock, sent=2.0, there=0.0001, held=3.0, back=0.0001)
    exchange(clock, sent=6.0, there=0.300, held=0.0, back=0.001)
    exchange(clock, sent=7.0, there=0.001, held=0.0, back=0.300)
    assert clock.seconds == pytest.approx(AHEAD, abs=1e-9)


def test_a_clock_that_drifts_is_followed_once_the_old_exchanges_left_the_window() -> None:
    clock = ClockOffset()
    exchange(clock, sent=0.0, there=0.0001, held=0.0, back=0.0001)
    for second in range(WINDOW):
        exchange(clock, sent=1.0 + second, there=0.001, held=0.0, back=0.001, ahead=AHEAD + 0.5)
    assert clock.seconds == pytest.approx(AHEAD + 0.5, abs=1e-9)
