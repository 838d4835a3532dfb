"""The worker group under any events in any order: hypothesis drives workers that follow no protocol, and the clock."""

import copy
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from protocol.codec import ProtocolError
from protocol.membership import (
    Assignment,
    EndEpoch,
    Heartbeat,
    Loaded,
    LoadFailed,
    LoadProgress,
    RankLost,
    Ready,
    Register,
    Shard,
    WorkerMessage,
)
from protocol.requests import EnginePhase
from protocol.steps import StepFault
from services.config import SchedulerConfig
from services.scheduler.membership import Ended, FailRequests, Refuse, Send, Started, WorkerGroup
from services.scheduler.membership.member_states import IN_EPOCH, MEMBER_TABLE, MemberState, event_of

Message = WorkerMessage | StepFault
WORKERS = st.sampled_from([name.encode() for name in "abcd"])
SHARDS = st.sampled_from((None, Shard(0, 2), Shard(1, 2), Shard(0, 1, 1, 2)))
SECONDS = st.sampled_from((0.5, 4.0, 6.0, 16.0, 31.0, 70.0, 2000.0))


def registration(shard: Shard | None = None, model_hash: str = "hash") -> Register:
    return Register("sim", "m", "host", 1, model_hash, "float32", (1, 2, 4), 4, "host:1", 0, shard)


def loaded(epoch: int) -> Loaded:
    return Loaded("hash", 100, 512, 64, 1000, epoch=epoch)


class GroupMachine(RuleBasedStateMachine):
    config: ClassVar[SchedulerConfig]

    def __init__(self) -> None:
        super().__init__()
        self.group = WorkerGroup(self.config)
        self.now = 0.0
        self.in_effect: Started | None = None
        self.requests_wait = False
        """An epoch in effect has ended, and its requests neither go on nor have failed."""
        self.last_epoch = 0

    # -- events --------------------------------------------------------------------------------------------------

    @rule(worker=WORKERS)
    def cooperate(self, worker: bytes) -> None:
        """The message that brings the worker further."""
        epoch = self.group.epoch
        messages: dict[MemberState, Message] = {
            MemberState.UNKNOWN: registration(),
            MemberState.RETURNING: registration(),
            MemberState.ASSIGNED: loaded(epoch),
            MemberState.LOADING: loaded(epoch),
            MemberState.INITIALIZING: Ready(epoch),
        }
        self.send(worker, messages.get(self.group.roster.state_of(worker), Heartbeat(epoch, 0)))

    @rule()
    def all_cooperate(self) -> None:
        for member in self.group.roster:
            self.cooperate(member.peer)

    @rule(worker=WORKERS, shard=SHARDS)
    def register(self, worker: bytes, shard: Shard | None) -> None:
        self.send(worker, registration(shard))

    @rule(worker=WORKERS)
    def register_another_model(self, worker: bytes) -> None:
        self.send(worker, registration(model_hash="other"))

    @rule(worker=WORKERS, kind=st.integers(0, 4), is_old=st.booleans())
    def report(self, worker: bytes, kind: int, is_old: bool) -> None:
        epoch = max(0, self.group.epoch - is_old)
        messages: list[Message] = [
            Heartbeat(epoch, 0), loaded(epoch), Ready(epoch), RankLost(epoch, "reset"), StepFault(epoch, 1, "bug")
        ]  # fmt: skip
        self.send(worker, messages[kind])

    @rule(worker=WORKERS, message=st.sampled_from([LoadProgress("weights", 0.5), LoadFailed("no memory")]))
    def report_loading(self, worker: bytes, message: Message) -> None:
        self.send(worker, message)

    @rule(worker=WORKERS)
    def break_connection(self, worker: bytes) -> None:
        self.group.on_gone(worker, "is gone", self.now)
        self.take_actions()

    @rule(worker=WORKERS)
    def send_impossible_result(self, worker: bytes) -> None:
        self.group.on_impossible_result(worker, "other rows", self.now)
        self.take_actions()

    @rule(ends=st.booleans())
    def step(self, ends: bool) -> None:
        if self.in_effect is not None:
            self.group.on_dispatch(1, self.now)
            if ends:
                self.group.on_result(self.in_effect.epoch, 1, self.now)

    @rule(seconds=SECONDS)
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.group.check(self.now)
        self.take_actions()

    # -- checks --------------------------------------------------------------------------------------------------

    def send(self, worker: bytes, message: Message) -> None:
        event, state = event_of(message, self.group.epoch), self.group.roster.state_of(worker)
        refused = event is not None and (state, event) not in MEMBER_TABLE and not self.group.failed
        before = self.contents()
        try:
            self.group.on_message(worker, message, self.now)
        except ProtocolError:
            assert refused
            assert self.contents() == before
        else:
            assert not refused
        self.take_actions()

    def contents(self) -> tuple[object, ...]:
        group = self.group
        return (group.state, group.status, group.epoch, group.size, [copy.copy(member) for member in group.roster])

    def take_actions(self) -> None:
        for action in self.group.take_actions():
            match action:
                case Send(peer, Assignment(epoch=epoch)):
                    assert epoch == self.group.epoch
                    assert self.in_effect is None
                    assert peer in self.group.roster
                case Send(peer, EndEpoch(epoch=epoch), everywhere):
                    assert everywhere
                    # The same event may begin the next
                    assert epoch in (self.group.epoch, self.group.epoch - 1)
                    assert self.group.roster.state_of(peer) not in IN_EPOCH
                case Refuse(peer):
                    assert peer not in self.group.roster
                case Started(epoch=epoch, peers=peers):
                    assert self.in_effect is None
                    assert epoch > self.last_epoch
                    assert peers == [member.peer for member in self.group.roster.ranks]
                    self.in_effect, self.last_epoch, self.requests_wait = action, epoch, False
                case Ended(epoch=epoch):
                    assert self.in_effect.epoch == epoch
                    self.in_effect, self.requests_wait = None, True
                case FailRequests():
                    assert self.requests_wait or self.group.failed
                    self.requests_wait = False

    @invariant()
    def states_agree(self) -> None:
        group, ranks = self.group, self.group.roster.ranks
        assert group.status.phase is (EnginePhase.RECOVERING if self.requests_wait else group.state)
        assert 0 <= group.status.progress <= 1
        assert (self.in_effect is not None) == (group.state is EnginePhase.READY)
        if not group.failed:
            assert len(ranks) == (group.size.world if group.size else 0)
            assert [member.rank for member in ranks] == list(range(len(ranks)))
        if self.in_effect is not None:
            assert {member.state for member in ranks} == {MemberState.READY}


@pytest.mark.parametrize(("tensor_parallel_size", "pipeline_parallel_size"), [(1, 1), (2, 1), (2, 2), ("auto", 1)])
def test_no_order_of_events_leads_the_group_astray(
    tensor_parallel_size: int | str, pipeline_parallel_size: int
) -> None:
    class Machine(GroupMachine):
        config = SchedulerConfig.model_validate(
            {
                "tensor_parallel_size": tensor_parallel_size,
                "pipeline_parallel_size": pipeline_parallel_size,
                "settle_seconds": 1.0,
                "max_spare_workers": 1,
                "recovery_timeout_seconds": 20.0,
            }
        )

    run_state_machine_as_test(
        Machine, settings=settings(max_examples=25, stateful_step_count=60, report_multiple_bugs=False)
    )
