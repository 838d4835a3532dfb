"""Silence of the scheduler, counted by frontends and workers."""

import pytest

from protocol.silence import DELAY_HALF_LIFE, MAX_PAUSE, SIGN_INTERVAL, SilenceWatch, unanswered


def test_silence_counts_from_the_first_sign_of_life() -> None:
    watch = SilenceWatch(2.0)
    assert [watch.check(56.0 + second) for second in range(5)] == [None] * 5
    assert not watch.exceeds(0.5)
    watch.heard()
    assert [watch.check(60.0 + second) for second in range(1, 5)] == [None, None, None, 3.0]


def test_a_message_ends_the_silence() -> None:
    watch = SilenceWatch(2.0)
    for second in range(20):
        watch.heard()
        assert watch.check(2.0 * second) is None
        assert watch.check(2.0 * second + 1) is None


def test_a_pause_of_this_process_counts_for_little() -> None:
    watch = SilenceWatch(2.0)
    watch.heard()
    assert watch.check(50.0) is None
    assert watch.check(90.0) is None, "what arrived in the pause is not read yet"
    assert watch.check(90.0 + MAX_PAUSE) is None
    assert watch.check(90.1 + MAX_PAUSE) is not None


def watched(*messages: float, until: float, interval: float = 0.25, lateness: float = 0.0) -> SilenceWatch:
    """Return a watch that checks every `interval`, each time `lateness` later, and hears messages at these times."""
    watch, now, pending = SilenceWatch(100.0, interval), 0.0, sorted(messages)
    watch.heard()
    while now < until:
        while pending and pending[0] <= now:
            watch.heard()
            pending.pop(0)
        watch.check(now)
        now += interval + lateness
    return watch


def test_a_short_silence_exceeds_a_short_limit_on_a_quiet_machine() -> None:
    signs = [SIGN_INTERVAL * number for number in range(11)]
    assert not watched(*signs, until=12.0).exceeds(2.5)
    assert watched(*signs, until=13.01).exceeds(2.5)


@pytest.mark.parametrize(("signs", "lateness"), [([0.0, 3.0, 6.0], 0.0), ([0.0], 1.0)])
def test_delays_of_the_peer_and_of_this_process_raise_a_short_limit(signs: list[float], lateness: float) -> None:
    watch = watched(*signs, until=8.5, lateness=lateness)
    assert watch.delay > 0.9
    assert not watch.exceeds(0.8)
    assert watch.silence > 0.8
    assert watched(*signs, until=60.0, lateness=0.0).exceeds(2.5), "a silence that goes on is noticed"


def test_an_observed_delay_fades() -> None:
    watch = SilenceWatch(100.0, 0.25)
    watch.check(0.0)
    watch.check(4.25)
    assert watch.delay == pytest.approx(4.0)
    now = 4.25
    while now < 4.25 + DELAY_HALF_LIFE:
        now += 0.25
        watch.check(now)
    assert watch.delay == pytest.approx(2.0)


def test_signs_wait_for_their_answers_from_the_next_one_on() -> None:
    assert [unanswered(sent, 3) for sent in (3, 4, 5, 8)] == [0.0, 0.0, SIGN_INTERVAL, 4 * SIGN_INTERVAL]
