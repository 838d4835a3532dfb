"""Placement policies by name: built-in ones, one that a package registers, and the guard around each."""

import logging
from pathlib import Path

import pytest

from services.frontend.placement import Place, Placement, Reason, find_placement_policy
from services.plugins import PluginError
from tests.examples.install import register
from tests.simulation.placement.cache_aware import CacheAwarePolicy
from tests.unit.frontend.placement.world import core, engine_of, names_of, prompt, report

LAST = """
class Last:
    uses_prefixes = False

    def choose(self, view):
        return len(view.rows) - 1

class Broken(Last):
    def choose(self, view):
        return 1 / 0 if view.count else len(view.rows)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "last_policy.py").write_text(LAST)
    points = {"last": "last_policy:Last", "broken": "last_policy:Broken", "none": "json:dumps"}
    register(tmp_path, "my-placement", {"runahead.placement_policies": points})
    return tmp_path


def test_the_policy_of_a_package_places_requests(site: Path) -> None:
    placement = core(*"abc", policy="last")
    assert {placement.place(key, prompt((key, 200))) for key in range(5)} == {Place("c", Reason.POLICY)}


def test_names_that_do_not_fit_are_refused_in_one_line(site: Path) -> None:
    with pytest.raises(
        PluginError, match="--placement-policy nearest: there is no such policy; choose one of prefix_aware"
    ):
        Placement("nearest")
    with pytest.raises(PluginError, match="json:dumps of my-placement is no placement policy: it must be a class with"):
        find_placement_policy("none")


def test_a_policy_that_fails_is_replaced_and_logged_once(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    placement = core(*"abc", policy="broken")
    for name in "ab":
        placement.on_engine(name, report(num_streams=5))
    with caplog.at_level(logging.ERROR):
        assert [engine_of(placement.place(key, b"")) for key in range(5)] == ["c"] * 5
    assert [record.message for record in caplog.records] == [
        "the placement policy failed; the least loaded engine is used instead: position 3 of 3 engines",
        "the placement policy failed; the least loaded engine is used instead: division by zero",
    ]


def test_least_loaded_counts_streams_and_what_was_placed_since() -> None:
    placement = core(*"abc", policy="least_loaded")
    for name, streams in (("a", 3), ("b", 1), ("c", 2)):
        placement.on_engine(name, report(num_streams=streams))
    assert engine_of(placement.place(1, b"")) == "b"
    assert {engine_of(placement.place(key, b"")) for key in (2, 3)} == {"b", "c"}
    for key in (1, 2, 3):
        placement.on_ended(key)
    assert engine_of(placement.place(4, b"")) == "b"


def test_round_robin_takes_turns_over_ready_engines() -> None:
    placement = core(*"abc", policy="round_robin")
    placed = [engine_of(placement.place(key, prompt((1, 400)))) for key in range(6)]
    assert placed == [*"abc"] * 2
    first = {engine_of(core(*"abcdefgh", policy="round_robin", seed=seed).place(1, b"")) for seed in range(20)}
    assert len(first) > 4


def test_cache_aware_follows_the_longest_match_while_loads_are_even() -> None:
    """The thresholds of SGLang's router: 30 % of the prompt, 64 streams and a ratio of 1.5."""
    placement = core(*"abc", policy="cache_aware")
    placement.on_blocks_stored("b", names_of(prompt((7, 100))))
    most = CacheAwarePolicy.BALANCE_ABS_THRESHOLD
    placement.on_engine("b", report(num_streams=most))
    assert engine_of(placement.place(1, prompt((7, 120)))) == "b"
    placement.on_engine("b", report(num_streams=most + 1))
    assert engine_of(placement.place(2, prompt((7, 120)))) != "b"
    placement.on_engine("b", report(num_streams=most))
    placement.on_ended(2)
    assert engine_of(placement.place(3, prompt((7, 20), (8, 80)))) != "b"  # 20 % match


def test_a_short_shared_prompt_does_not_gather_requests_at_one_idle_engine() -> None:
    placement = core(*"abcd")
    placed = [engine_of(placement.place(key, prompt((1, 16), (10 + key, 40)))) for key in range(8)]
    assert sorted(placed) == sorted("abcd" * 2)


def test_a_long_shared_prompt_does() -> None:
    placement = core(*"abcd")
    first = engine_of(placement.place(0, prompt((1, 400), (10, 40))))
    placement.on_engine(first, report())  # it is computed
    assert engine_of(placement.place(1, prompt((1, 400), (11, 40)))) == first
