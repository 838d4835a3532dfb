"""The tables of membership: every pair of state and event has a row, or is refused and changes nothing."""

import copy
from collections import deque
from itertools import product

import pytest

from protocol.codec import ProtocolError
from protocol.membership import Heartbeat, Loaded, LoadFailed, LoadProgress, RankLost, Ready, Register, WorkerMessage
from protocol.requests import EnginePhase
from protocol.steps import StepFault
from services.config import SchedulerConfig
from services.scheduler.membership import WorkerGroup
from services.scheduler.membership.group_states import GROUP_TABLE, GroupAction, GroupEvent
from services.scheduler.membership.member_states import (
    IN_EPOCH,
    MEMBER_TABLE,
    MESSAGES,
    MemberAction,
    MemberEvent,
    MemberState,
    event_of,
)
from services.scheduler.membership.roster import Roster
from services.scheduler.transitions import IllegalTransition

WORKER = Register("sim", "m", "host", 1, "hash", "float32", tensor_parallel_sizes=(1, 2))
EPOCH = 1
MESSAGES_OF_EPOCH: dict[type, WorkerMessage | StepFault] = {
    Register: WORKER,
    Heartbeat: Heartbeat(EPOCH, 0),
    LoadProgress: LoadProgress("weights", 0.5),
    Loaded: Loaded("hash", 100, 512, 64, 1000, epoch=EPOCH),
    Ready: Ready(EPOCH),
    RankLost: RankLost(EPOCH, "connection reset"),
    LoadFailed: LoadFailed("out of memory"),
    StepFault: StepFault(EPOCH, 3, "out of memory"),
}


def paths() -> dict[MemberState, tuple[MemberEvent, ...]]:
    """The events that lead from UNKNOWN to each state."""
    found: dict[MemberState, tuple[MemberEvent, ...]] = {MemberState.UNKNOWN: ()}
    queue = deque([MemberState.UNKNOWN])
    while queue:
        state = queue.popleft()
        for (before, event), (after, _) in MEMBER_TABLE.items():
            if before is state and after not in found:
                found[after] = (*found[state], event)
                queue.append(after)
    return found


PATHS = paths()


def roster_in(state: MemberState) -> Roster:
    """A roster of one worker, brought to its state through the table."""
    roster = Roster()
    for event in PATHS[state]:
        if event is MemberEvent.REGISTER:
            roster.add(b"a", WORKER, 0.0)
        roster.apply(b"a", event, 0.0)
    assert roster.state_of(b"a") is state
    return roster


def contents(roster: Roster) -> list[object]:
    return [copy.copy(member) for member in roster]


@pytest.mark.parametrize(("state", "event"), list(product(MemberState, MemberEvent)))
def test_every_member_event_has_a_row_or_changes_nothing(state: MemberState, event: MemberEvent) -> None:
    roster = roster_in(state)
    before = contents(roster)
    if (state, event) not in MEMBER_TABLE:
        with pytest.raises(IllegalTransition, match=f"{event.name} has no place while a worker is {state.name}"):
            roster.apply(b"a", event, 1.0)
        assert contents(roster) == before
        return
    if state is MemberState.UNKNOWN and event is MemberEvent.REGISTER:
        roster.add(b"a", WORKER, 1.0)
    after, actions = MEMBER_TABLE[state, event]
    assert roster.apply(b"a", event, 1.0) == actions
    assert roster.state_of(b"a") is after
    assert (b"a" in roster) is (after is not MemberState.UNKNOWN)


def test_every_message_has_an_event() -> None:
    assert set(MESSAGES) == set(MESSAGES_OF_EPOCH)


def test_every_state_action_and_event_is_used() -> None:
    assert set(PATHS) == set(MemberState)
    assert {event for _, event in MEMBER_TABLE} == set(MemberEvent)
    assert {action for _, actions in MEMBER_TABLE.values() for action in actions} == set(MemberAction)
    reached = {after for after, _ in GROUP_TABLE.values()}
    assert reached == set(EnginePhase) - {EnginePhase.DRAINING, EnginePhase.RECOVERING}
    assert {event for _, event in GROUP_TABLE} == set(GroupEvent)
    assert {action for _, actions in GROUP_TABLE.values() for action in actions} == set(GroupAction)


# -- rules that rows share ---------------------------------------------------------------------------------------------


def test_a_rank_leaves_its_epoch_by_its_end_or_breaks_it() -> None:
    for (before, event), (after, actions) in MEMBER_TABLE.items():
        if before in IN_EPOCH and after not in IN_EPOCH:
            assert (event is MemberEvent.END) != (MemberAction.BREAK in actions), (before, event)
        assert MemberAction.BREAK not in actions or before in IN_EPOCH, (before, event)


def test_workers_that_come_and_go_are_counted() -> None:
    for (before, event), (after, actions) in MEMBER_TABLE.items():
        unknown = MemberState.UNKNOWN
        assert (MemberAction.JOIN in actions) == (before is unknown and after is not unknown), (before, event)
        assert (MemberAction.LEAVE in actions) == (before is not unknown and after is unknown), (before, event)


def test_steps_are_void_when_and_only_when_the_epoch_in_effect_ends() -> None:
    for (before, event), (after, actions) in GROUP_TABLE.items():
        assert (GroupAction.START in actions) == (after is EnginePhase.READY), (before, event)
        assert (GroupAction.VOID in actions) == (before is EnginePhase.READY), (before, event)


def test_ranks_are_told_of_the_end_whenever_an_epoch_ends_and_the_group_goes_on() -> None:
    waiting = EnginePhase.WAITING_FOR_WORKERS
    for (before, event), (after, actions) in GROUP_TABLE.items():
        begins = before is waiting and after is EnginePhase.LOADING
        assert (GroupAction.END in actions) == (before is not waiting and after is waiting), (before, event)
        assert (GroupAction.ASSIGN in actions) == begins, (before, event)


def test_a_failed_group_has_no_rows_and_no_requests() -> None:
    for (before, event), (after, actions) in GROUP_TABLE.items():
        assert (GroupAction.END_REQUESTS in actions) == (after is EnginePhase.FAILED), (before, event)
    assert all(state is not EnginePhase.FAILED for state, _ in GROUP_TABLE)
    assert all((state, GroupEvent.FAIL) in GROUP_TABLE for state, _ in GROUP_TABLE)


# -- what any worker may send in any state -----------------------------------------------------------------------------

SCRIPTS: dict[MemberState, list[tuple[str, type]]] = {
    MemberState.UNKNOWN: [("bc", Register)],
    MemberState.SPARE: [("bc", Register), ("a", Register)],
    MemberState.ASSIGNED: [("ab", Register)],
    MemberState.LOADING: [("ab", Register), ("a", Heartbeat)],
    MemberState.LOADED: [("ab", Register), ("a", Loaded)],
    MemberState.INITIALIZING: [("ab", Register), ("ab", Loaded)],
    MemberState.READY: [("ab", Register), ("ab", Loaded), ("a", Ready)],
    MemberState.RETURNING: [("ab", Register), ("b", LoadFailed)],
}
"""Messages of workers to a group of two ranks, after which worker `a` is in the state and epoch 1 has begun."""


def group_with(state: MemberState) -> WorkerGroup:
    group = WorkerGroup(SchedulerConfig(tensor_parallel_size=2))
    for names, kind in SCRIPTS[state]:
        for name in names:
            group.on_message(name.encode(), MESSAGES_OF_EPOCH[kind], 0.0)
    assert (group.roster.state_of(b"a"), group.epoch) == (state, EPOCH)
    list(group.take_actions())
    return group


def snapshot(group: WorkerGroup) -> tuple[object, ...]:
    state = group.state, group.status, group.epoch, group.size
    return *state, vars(group.losses).copy(), contents(group.roster), list(group.take_actions())


@pytest.mark.parametrize("state", MemberState)
@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_is_handled_or_refused_by_name(state: MemberState, kind: type) -> None:
    group, message = group_with(state), MESSAGES_OF_EPOCH[kind]
    before = snapshot(group)
    event = event_of(message, EPOCH)
    assert event is not None
    if (state, event) in MEMBER_TABLE:
        group.on_message(b"a", message, 1.0)
        assert len(group.roster.ranks) == (group.size.world if group.size else 0)
        return
    with pytest.raises(ProtocolError, match=f"{kind.__name__} has no place while worker host:1 is {state.name}"):
        group.on_message(b"a", message, 1.0)
    assert snapshot(group) == before


@pytest.mark.parametrize("state", MemberState)
@pytest.mark.parametrize(
    "message", [Heartbeat(9, 0), Loaded("hash", 1, 1, 1, 1, epoch=9), Ready(9), RankLost(9, "x"), StepFault(9, 1, "x")]
)
def test_a_message_of_another_epoch_is_a_sign_of_life_and_nothing_else(
    state: MemberState, message: WorkerMessage | StepFault
) -> None:
    group = group_with(state)
    before = snapshot(group)
    group.on_message(b"a", message, 1.0)
    if b"a" in group.roster:
        assert group.roster[b"a"].last_seen == 1.0
        group.roster[b"a"].last_seen = 0.0
    assert snapshot(group) == before
