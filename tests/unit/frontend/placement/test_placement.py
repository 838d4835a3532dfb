"""Decisions of the placement core, one scenario each."""

import hashlib

import pytest

from services.frontend.placement import Condition, Hold, LoadAhead, Move, Place, Reason, RefuseRequest, Role
from services.frontend.placement.fleet import SLOW_SECONDS
from services.frontend.placement.placement import REST
from services.frontend.placement.policies import PrefixAwarePolicy
from tests.unit.frontend.placement.world import BLOCK_SIZE, TOKEN_SECONDS, core, engine_of, names_of, prompt, report

LONG = prompt((7, 400))
OTHER = prompt((8, 400))


# -- placing -----------------------------------------------------------------------------------------------------------


def test_one_engine_gets_every_request_and_nothing_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = core("a")
    placement.on_blocks_stored("a", names_of(LONG))

    def fail(_: bytes) -> None:
        raise AssertionError

    monkeypatch.setattr(hashlib, "sha256", fail)
    monkeypatch.setattr("services.frontend.placement.prefix_names.sha256", fail)
    assert placement.place(1, LONG) == Place("a", Reason.ONLY_ENGINE)
    placement.on_engine("b", report())
    with pytest.raises(AssertionError):
        placement.place(2, LONG)


def test_long_prompts_go_to_an_engine_that_computes_them_and_then_to_one_that_decodes() -> None:
    placement = core("a", "b")
    placement.on_engine("p", report(role=Role.PREFILL))
    assert engine_of(placement.place(1, prompt((1, 100)))) in "ab", "a short prompt"
    assert placement.place(2, prompt((2, 600))) == Place("p", Reason.PREFILL)
    move = placement.prefilled(2)
    assert move is not None
    assert move in (Move(2, "p", "a", Reason.PREFILLED), Move(2, "p", "b", Reason.PREFILLED))
    again = placement.place(3, prompt((2, 600), (3, 50)))
    assert engine_of(again) == move.target, "it has the blocks now"
    for name in "ab":
        placement.on_engine(name, report(Condition.GONE))
    assert {move.target for move in placement.moves()} == {"p"}
    assert placement.place(4, prompt((4, 600))) == Place("p", Reason.ONLY_ENGINE), "nobody else decodes"


def test_blocks_of_a_prompt_are_fetched_where_it_will_go_on_while_it_is_computed() -> None:
    placement = core("a", "b")
    placement.on_engine("p", report(role=Role.PREFILL))
    first, second = prompt((1, 600)), prompt((2, 600))
    placement.place(1, first)
    placement.place(2, second)
    [ahead] = placement.on_blocks_stored("p", names_of(first)[: 300 // BLOCK_SIZE])
    assert (ahead.key, ahead.num_tokens) == (1, 256), "prefixes are known at each 128 tokens"
    for _ in range(20):  # it would be the worse choice now
        placement.place(10, prompt((3, 100)))
        placement.on_engine(ahead.target, report(queue_seconds=100.0))
    assert [*placement.on_blocks_stored("p", names_of(first))] == [LoadAhead(1, ahead.target, 512)]
    assert placement.on_blocks_stored(ahead.target, names_of(first)) == [], "it computes for itself"
    assert placement.prefilled(1) == Move(1, "p", ahead.target, Reason.PREFILLED)
    assert placement.on_blocks_stored("p", names_of(first)) == [], "it has moved"
    [other] = placement.on_blocks_stored("p", names_of(second))
    assert other.target != ahead.target
    placement.on_engine(other.target, report(Condition.GONE))
    assert placement.prefilled(2) == Move(2, "p", ahead.target, Reason.PREFILLED)


def test_a_session_returns_to_the_engine_that_computed_its_prefix() -> None:
    placement = core(*"abcd")
    first = engine_of(placement.place(1, LONG))
    placement.on_ended(1)
    for key in range(2, 20):  # others are busier now
        placement.place(key, prompt((100 + key, 40)))
    turn = LONG + prompt((9, 60))
    assert placement.place(20, turn) == Place(first, Reason.PREFIX, 384)  # segments of 128 tokens are compared


def test_the_blocks_of_events_are_found_and_those_removed_are_not() -> None:
    placement = core(*"abc")
    short = prompt((5, 40))
    placement.on_blocks_stored("b", names_of(short)[:6])
    assert placement.place(1, short) == Place("b", Reason.PREFIX, 6 * BLOCK_SIZE)
    placement = core(*"abc")
    placement.on_blocks_stored("b", names_of(short)[:6])
    placement.on_blocks_removed("b", names_of(short)[2:6])
    assert placement.place(1, short) == Place("b", Reason.PREFIX, 2 * BLOCK_SIZE)
    placement.on_ended(1)
    placement.on_blocks_cleared("b")
    assert placement.place(2, short) != Place("b", Reason.PREFIX, 2 * BLOCK_SIZE)


@pytest.mark.parametrize(("queued", "reason"), [(0.9, Reason.PREFIX), (1.1, Reason.LOAD)])
def test_a_hit_is_worth_the_seconds_that_it_saves(queued: float, reason: Reason) -> None:
    """The seconds of this request, and of those that would wait behind it."""
    placement = core(*"ab")
    placement.on_blocks_stored("a", names_of(prompt((7, 100))))
    placement.on_engine("a", report(queue_seconds=queued * PrefixAwarePolicy.DELAYED * 100 * TOKEN_SECONDS))
    decision = placement.place(1, prompt((7, 120)))
    assert isinstance(decision, Place)
    assert (decision.reason, decision.engine) == (reason, "a" if reason is Reason.PREFIX else "b")


def test_a_burst_between_two_reports_spreads() -> None:
    placement = core(*"abcd")
    placed = [engine_of(placement.place(key, prompt((key, 100)))) for key in range(8)]
    assert sorted(placed) == sorted("abcd" * 2)
    placement.on_engine("a", report())  # the report counts what was placed before it
    assert engine_of(placement.place(9, OTHER)) == "a"


def test_frontends_with_equal_reports_choose_different_engines() -> None:
    chosen = {engine_of(core(*"abcdefgh", seed=seed).place(1, LONG)) for seed in range(30)}
    assert len(chosen) > 4


def test_a_prefix_under_another_salt_is_not_found() -> None:
    placement = core(*"ab")
    placement.on_blocks_stored("a", names_of(LONG, "tenant"))
    placement.on_engine("b", report(queue_seconds=0.1))
    assert placement.place(1, LONG, "tenant") == Place("a", Reason.PREFIX, 384)
    placement.on_engine("a", report(queue_seconds=0.2))
    for key, salt in enumerate(("", "tenant 2", "tenan"), 2):
        decision = placement.place(key, LONG, salt)
        assert decision == Place("b", Reason.NO_PREFIX)
        placement.on_engine("b", report(queue_seconds=0.1))
        placement.on_blocks_cleared("b")


@pytest.mark.parametrize("condition", [c for c in Condition if c is not Condition.READY])
def test_only_ready_engines_get_requests(condition: Condition) -> None:
    placement = core(*"ab")
    placement.on_engine("a", report(condition))
    placement.on_engine("b", report(queue_seconds=50.0))
    assert {engine_of(placement.place(key, prompt((key, 40)))) for key in range(10)} == {"b"}


@pytest.mark.parametrize("condition", [Condition.CONNECTING, Condition.SILENT, Condition.GONE])
def test_requests_wait_for_an_engine_that_may_come_back(condition: Condition) -> None:
    placement = core(*"a")
    placement.on_engine("a", report(condition))
    assert placement.place(1, LONG) == Hold(f"no engine is ready; {condition}")
    placement.on_engine("a", report())
    assert engine_of(placement.place(1, LONG)) == "a"


def test_requests_are_refused_if_no_engine_can_come_back() -> None:
    placement = core()
    assert isinstance(refused := placement.place(1, LONG), RefuseRequest)
    placement.on_engine("a", report(Condition.DRAINING))
    assert placement.place(1, LONG) == refused


def test_output_of_one_model_goes_on_with_the_same_model_only() -> None:
    placement = core(*"ab")
    placement.on_engine("b", report(identity="other"))
    assert {engine_of(placement.place(key, LONG, "", "other")) for key in range(5)} == {"b"}
    placement.on_engine("b", report(Condition.SILENT, identity="other"))
    assert isinstance(placement.place(6, LONG, "", "other"), Hold)
    placement.on_engine_removed("b")
    assert isinstance(refused := placement.place(6, LONG, "", "other"), RefuseRequest)
    assert "model" in refused.message
    placement.on_engine("c", report(Condition.CONNECTING, identity=""))
    assert isinstance(placement.place(6, LONG, "", "other"), Hold), "it may be the one"
    assert placement.place(6, LONG, "", "other", ("a",)) == refused, "it may also never serve"
    placement.on_engine("c", report(Condition.GONE, identity=""))
    assert placement.place(6, LONG, "", "other") == refused, "it is not expected back"


# -- moving ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "reason"), [(Condition.GONE, Reason.LOST), (Condition.DRAINING, Reason.DRAINING)]
)
def test_streams_move_from_an_engine_that_is_lost_or_drains(condition: Condition, reason: Reason) -> None:
    placement = core("a")
    placement.place(1, prompt((1, 10)))
    placement.on_engine("b", report())
    assert placement.moves() == []
    placement.on_engine("a", report(Condition.SILENT))
    assert placement.moves() == []
    placement.on_engine("a", report(condition))
    assert placement.moves() == [Move(1, "a", "b", reason)]
    assert placement.moves() == []


def test_a_stream_of_an_unknown_model_stays() -> None:
    placement = core()
    placement.on_engine("a", report(identity=""))
    placement.on_engine("b", report(Condition.CONNECTING, identity=""))
    placement.place(1, LONG)
    placement.on_engine("b", report(identity=""))
    placement.on_engine("a", report(Condition.GONE, identity=""))
    assert placement.moves() == []


def test_a_stream_moves_to_the_engine_that_holds_its_prefix() -> None:
    placement = core("a")
    placement.on_engine("z", report(Condition.CONNECTING))
    placement.place(1, LONG)
    for name in "bcd":
        placement.on_engine(name, report())
    placement.on_blocks_stored("c", names_of(LONG))
    placement.on_engine_removed("a")
    assert placement.moves() == [Move(1, "a", "c", Reason.LOST)]


def test_moves_are_paced_by_the_seconds_of_recomputation() -> None:
    """Each stream takes 1 s to recompute. At most half of the target's time is spent on those that drain, so one moves
    every 2 s, 0.25 s before the target is free; those of a lost engine wait already, and move as fast as they are
    recomputed, 1 s before."""
    for condition, seconds in ((Condition.DRAINING, 4 * 2 - 0.2), (Condition.GONE, 4 * 1 - 0.9)):
        placement = core("a")
        for key in range(5):
            placement.place(key, prompt((key, 100)))
        placement.on_engine("b", report())
        placement.on_engine("a", report(condition))
        moved = []
        for tenth in range(200):
            placement.advance(tenth / 10)
            moved += [(tenth / 10, move.key) for move in placement.moves()]
        assert [key for _, key in moved] == [0, 1, 2, 3, 4]
        assert moved[-1][0] - moved[0][0] == pytest.approx(seconds)


def test_streams_leave_a_slow_engine_once_and_never_return() -> None:
    placement = core("a")
    placement.place(1, prompt((1, 10)))

    def run(seconds: float, begin: float, **output: float) -> list[Move]:
        moved = []
        for second in range(int(seconds)):
            placement.advance(begin + second)
            for name, value in output.items():
                placement.on_engine(name, report(output_seconds=value))
            moved += placement.moves()
        return moved

    assert run(REST, 0.0, a=0.1, b=0.03) == []  # not far slower
    assert run(SLOW_SECONDS, 100.0, a=1.0, b=0.03) == []  # not for long
    assert run(SLOW_SECONDS, 105.0, a=1.0, b=0.03) == [Move(1, "a", "b", Reason.SLOW)]
    assert engine_of(placement.place(2, LONG)) == "b"
    # Now b is slow: its second stream, which has not left a, moves when it has rested; the first one stays.
    assert run(REST - 2, 111.0, a=0.03, b=1.0) == []
    assert run(10, 141.0, a=0.03, b=1.0) == [Move(2, "b", "a", Reason.SLOW)]
    assert run(100, 160.0, a=1.0, b=0.03, c=0.03) == [Move(2, "a", "c", Reason.SLOW)]
    placement.on_engine_removed("b")  # a loss moves any stream anywhere
    assert [move.key for move in placement.moves()] == [1]


def test_an_engine_that_computes_prompts_is_not_slow_for_its_few_tokens() -> None:
    placement = core("a")
    for second in range(2 * int(REST)):
        placement.advance(float(second))
        placement.on_engine("a", report(output_seconds=0.03))
        placement.on_engine("p", report(output_seconds=5.0, role=Role.PREFILL))
        assert engine_of(placement.place(second, prompt((second, 600)))) == "p"
        assert placement.moves() == []


def test_a_stream_does_not_move_to_its_own_engine_that_has_just_become_fast() -> None:
    placement = core(*"ab")
    placement.on_engine("b", report(queue_seconds=99.0))
    assert engine_of(placement.place(1, LONG)) == "a"
    for second in range(20):
        placement.advance(float(second))
        placement.on_engine("a", report(output_seconds=1.0))
        placement.on_engine("b", report(output_seconds=0.1, queue_seconds=99.0))
        assert placement.moves() == []
    placement.advance(19.0 + REST)
    placement.on_engine("b", report(output_seconds=0.1, queue_seconds=99.0))
    placement.on_engine("a", report(output_seconds=1.0))
    placement.advance(19.5 + REST)
    assert placement.moves() == [Move(1, "a", "b", Reason.SLOW)]
    placement.place(2, LONG)
    placement.on_engine("a", report(output_seconds=0.1))
    assert placement.moves() == []


def test_engines_of_different_models_are_not_compared() -> None:
    placement = core("a")
    placement.place(1, LONG)
    for second in range(60):
        placement.advance(float(second))
        placement.on_engine("a", report(output_seconds=9.0))
        placement.on_engine("b", report(output_seconds=0.1, identity="other"))
        assert placement.moves() == []
    assert {engine_of(placement.place(key, prompt((key, 100)))) for key in range(2, 6)} == {"a", "b"}


def test_a_clock_that_jumps_back_changes_nothing() -> None:
    placement = core("a")
    placement.advance(1e6)
    placement.place(1, prompt((1, 100)))
    placement.place(2, prompt((2, 100)))
    placement.on_engine("b", report())
    placement.on_engine("a", report(Condition.DRAINING))
    assert len(placement.moves()) == 1
    placement.advance(3.0)
    assert placement.moves() == []
    placement.advance(1e6 + 2)
    assert len(placement.moves()) == 1
