"""The placement core under any events in any order: hypothesis drives engines, requests and the clock."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from services.frontend.placement import Condition, EngineReport, Hold, Place, Placement, Reason, RefuseRequest, Role
from services.frontend.placement.decisions import MAY_SERVE, MOVES_STREAMS
from services.frontend.placement.fleet import EngineColumns
from services.frontend.placement.policies import BUILT_IN
from services.frontend.placement.records import Record
from services.frontend.placement.replay import decode_record, first_difference
from tests.unit.frontend.placement.world import BLOCK_SIZE, names_of, prompt

ENGINES = st.sampled_from("abcde")
IDENTITIES = st.sampled_from(("", "x", "y"))
SECONDS = st.sampled_from((0.0, 0.001, 0.1, 10.0))
PROMPTS = [prompt((1, 3)), prompt((1, 40)), prompt((1, 40), (2, 400)), prompt((3, 1000))]
PROMPT = st.integers(0, len(PROMPTS) - 1)
KEYS = st.integers(0, 30)
REPORTS = st.builds(
    EngineReport,
    st.sampled_from(Condition) | st.just(Condition.READY),
    IDENTITIES,
    SECONDS,
    st.sampled_from((0, BLOCK_SIZE, 16)),
    SECONDS,
    st.integers(0, 200),
    SECONDS,
    st.sampled_from(Role),
)


class PlacementMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[Record] = []
        self.now = 0.0
        self.reports: dict[str, EngineReport] = {}
        """Listed engines."""
        self.engine_of: dict[int, str] = {}
        self.identity_of: dict[int, str] = {}
        """Model of the tokens of an open request."""
        self.refused_by: dict[int, tuple[str, ...]] = {}
        """Engines that refuse it for good."""
        self.fetches: dict[int, str] = {}
        """Engine that has fetched blocks of a request last."""
        self.num_comparisons = 0
        """Looks for slow engines that may have found one. The second look at one moves its streams."""

    @initialize(policy=st.sampled_from(sorted(BUILT_IN)))
    def start(self, policy: str) -> None:
        self.core = Placement(policy, 16, 7, self.records.append)

    # -- events --------------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from((-5.0, 0.1, 3.0, 40.0)))
    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.core.advance(self.now)

    @rule(name=ENGINES, report=REPORTS)
    def report(self, name: str, report: EngineReport) -> None:
        self.reports[name] = report
        self.core.on_engine(name, report)

    @rule(name=ENGINES)
    def remove(self, name: str) -> None:
        self.reports.pop(name, None)
        self.core.on_engine_removed(name)

    @rule(name=ENGINES, prompt=PROMPT, change=st.sampled_from(("stored", "removed", "cleared")))
    def blocks(self, name: str, prompt: int, change: str) -> None:
        names = names_of(PROMPTS[prompt])
        changes: dict[str, Callable[[], None]] = {
            "stored": lambda: self.stored(name, names),
            "removed": lambda: self.core.on_blocks_removed(name, names[len(names) // 2 :]),
            "cleared": lambda: self.core.on_blocks_cleared(name),
        }
        changes[change]()

    def stored(self, name: str, names: list[bytes]) -> None:
        """Blocks of prompts that an engine computes for others are fetched where these will go on."""
        for ahead in self.core.on_blocks_stored(name, names):
            assert self.engine_of[ahead.key] == name
            assert self.reports[name].role is Role.PREFILL
            target = self.reports[ahead.target]
            assert (target.condition, target.role is Role.PREFILL) == (Condition.READY, False)
            assert self.identity_of[ahead.key] in ("", target.identity)
            assert 0 < ahead.num_tokens <= len(names) * self.reports[name].block_size
            self.fetches[ahead.key] = ahead.target

    @rule(key=KEYS)
    def end(self, key: int) -> None:
        self.forget(key)
        self.core.on_ended(key)

    @rule(name=ENGINES)
    def forget_refusals(self, name: str) -> None:
        self.refused_by = {key: tuple({*names} - {name}) for key, names in self.refused_by.items()}
        self.core.forget_refusals(name)

    def forget(self, key: int) -> None:
        for known in (self.engine_of, self.identity_of, self.refused_by, self.fetches):
            known.pop(key, None)

    # -- decisions -----------------------------------------------------------------------------------------------------

    @rule(
        key=KEYS, prompt=PROMPT, identity=IDENTITIES, for_now=st.just(()) | st.tuples(ENGINES),
        for_good=st.just(()) | st.tuples(ENGINES),
    )  # fmt: skip
    def place(self, key: int, prompt: int, identity: str, for_now: tuple[str, ...], for_good: tuple[str, ...]) -> None:
        refused = for_now + for_good
        tokens, unknown = PROMPTS[prompt], set() if refused else {*MAY_SERVE} - {Condition.GONE}
        fitting = {
            name: report
            for name, report in self.reports.items()
            if name not in refused
            and (not identity or report.identity in (identity, "" if report.condition in unknown else identity))
        }
        ready = [name for name, report in fitting.items() if report.condition is Condition.READY]
        if for_good and not ready:
            ready = [name for name, report in fitting.items() if report.condition is Condition.DRAINING]
        decision = self.core.place(key, tokens, "", identity, refused, for_good)
        self.forget(key)
        match decision:
            case Place(engine=name, hit_tokens=hit, reason=reason):
                assert name in ready
                roles = {self.reports[each].role for each in ready}
                only_computes = self.reports[name].role is Role.PREFILL
                if self.num_comparisons < 2 and roles != {Role.PREFILL}:
                    assert only_computes == (reason is Reason.PREFILL)
                assert 0 <= hit <= len(tokens) // 4
                self.engine_of[key], self.identity_of[key] = name, self.reports[name].identity
                self.refused_by[key] = for_good
            case Hold():
                assert not ready
                assert any(report.condition in MAY_SERVE for report in fitting.values())
            case RefuseRequest(message=text):
                assert text
                assert not ready
                assert not any(report.condition in MAY_SERVE for report in fitting.values())

    @rule()
    def move(self) -> None:
        self.num_comparisons += len({each.seconds_per_output_token for each in self.reports.values()} - {0.0}) > 1
        for move in self.core.moves():
            assert self.engine_of[move.key] == move.source != move.target
            assert move.target not in self.refused_by[move.key]
            target = self.reports[move.target]
            assert target.condition is Condition.READY
            assert target.identity == self.identity_of[move.key] != ""
            source = self.reports.get(move.source)
            condition = Condition.GONE if source is None else source.condition
            lost = dict.fromkeys((Condition.GONE, Condition.RECOVERING), Reason.LOST)
            expected = lost | {Condition.DRAINING: Reason.DRAINING}
            assert move.reason is expected.get(condition, Reason.SLOW)
            assert move.reason is not Reason.SLOW or condition is Condition.READY
            self.engine_of[move.key] = move.target

    @precondition(lambda self: self.engine_of)
    @rule(index=KEYS)
    def prefilled(self, index: int) -> None:
        """A stream goes to an engine that decodes, and stays only if there is none of its model."""
        key = sorted(self.engine_of)[index % len(self.engine_of)]
        assert self.core.prefilled(-1) is None
        move = self.core.prefilled(key)
        assert (move.source, move.reason) == (self.engine_of[key], Reason.PREFILLED)
        model, ready = self.identity_of[key], Condition.READY
        roles = {
            name: report.role
            for name, report in self.reports.items()
            if report.condition is ready and (not model or report.identity == model)
        }
        if {*roles.values()} > {Role.PREFILL}:
            assert roles.get(move.target, Role.PREFILL) is not Role.PREFILL
            if roles.get(fetches := self.fetches.get(key, ""), Role.PREFILL) is not Role.PREFILL:
                assert move.target == fetches, "it has the blocks"
        else:
            assert move.target == move.source
        self.engine_of[key] = move.target

    @rule()
    def streams_of_lost_engines_leave(self) -> None:
        """A stream is on a lost engine only while no engine takes it that has its model."""
        for _ in range(50):
            self.now += 1e6
            self.core.advance(self.now)
            self.move()
        ready = {name: each.identity for name, each in self.reports.items() if each.condition is Condition.READY}
        for key, name in self.engine_of.items():
            report = self.reports.get(name)
            if report is None or report.condition in MOVES_STREAMS:
                models = {model for each, model in ready.items() if each not in self.refused_by[key]}
                assert self.identity_of[key] not in models - {""}

    @invariant()
    def index_is_bounded(self) -> None:
        longest = max(len(tokens) for tokens in PROMPTS) // 4 // BLOCK_SIZE
        assert self.records == [] or self.core.num_block_names <= 2 * (16 + longest)

    def teardown(self) -> None:
        recording = [*map(decode_record, map(msgspec.json.encode, self.records))]
        assert recording == self.records
        assert first_difference(recording) is None


STEPS = settings(max_examples=150, stateful_step_count=40, deadline=None)
FIRST: Any = {
    "max_examples": 5000,
    "phases": [Phase.generate],
    "report_multiple_bugs": False,
    "derandomize": True,
    "database": None,
}
"""Until something fails."""


def test_any_events_in_any_order() -> None:
    run_state_machine_as_test(PlacementMachine, settings=STEPS)


def test_a_stream_that_stays_where_its_prompt_was_computed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineColumns, "by_role", lambda _, rows: (rows, rows[:0]))
    with pytest.raises(AssertionError):
        run_state_machine_as_test(PlacementMachine, settings=settings(STEPS, **FIRST))


def test_a_recording_with_another_decision_is_noticed() -> None:
    records: list[Record] = []
    core = Placement(record=records.append)
    core.on_engine("a", EngineReport(Condition.READY))
    core.on_engine("b", EngineReport(Condition.READY, queue_seconds=1.0))
    assert core.place(1, PROMPTS[1]) == records[-1]
    changed = [*records[:-1], Place("b", Reason.NO_PREFIX)]
    assert first_difference(records) is None
    assert first_difference(changed) == (changed[-1], records[-1])
