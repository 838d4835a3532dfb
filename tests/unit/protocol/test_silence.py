"""Silence of the scheduler, counted by frontends and workers."""

from protocol.silence import MAX_PAUSE, SilenceWatch


def test_silence_counts_from_the_first_sign_of_life() -> None:
    watch = SilenceWatch(2.0)
    assert watch.check(50.0) is None
    assert watch.check(60.0) is None
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
