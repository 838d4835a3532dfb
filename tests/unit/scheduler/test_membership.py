"""The worker group by scenario.

Any order of events is in test_membership_machine.py, the tables are in test_membership_tables.py, and the group with
the services around it and random faults is in tests/simulation/whole.
"""

import math

import msgspec
import pytest

from protocol.block_names import NAME_BYTES, NamedBlocks
from protocol.codec import Decoder, encode, pack
from protocol.fields import MAX_TEXT
from protocol.membership import (
    Assignment,
    EndEpoch,
    GroupMessage,
    Heartbeat,
    InitializeCache,
    Loaded,
    LoadFailed,
    LoadProgress,
    RankLost,
    Ready,
    Register,
    Shard,
    Shutdown,
    WorkerMessage,
)
from protocol.pooling import PoolingModel
from protocol.requests import EngineMessage, EnginePhase, EngineState, GenerateRequest
from protocol.sampling import SamplingParams
from protocol.steps import KeepPins, KeptPin, LoadBlocks, StepFault
from services.config import SchedulerConfig
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.engine_state import StateReports
from services.scheduler.membership import Action, Ended, FailRequests, News, Refuse, Send, Started, WorkerGroup
from services.scheduler.membership.formation import RETURN_SECONDS
from services.scheduler.membership.group import STOP_SETTLE
from services.scheduler.membership.losses import MAX_FUTILE_EPOCHS, PROVEN_AFTER
from services.scheduler.membership.member_states import MemberState
from services.scheduler.membership.step_watch import FLOOR, SMALLEST, STRETCH, StepSize
from services.scheduler.membership.timeouts import ASSIGN_TIMEOUT, LOAD_SILENCE, LOAD_STALL, RETURN_TIMEOUT
from services.scheduler.policies import ChunkedPolicy
from services.scheduler.structured_output import StructuredOutput
from services.scheduler.tier_reports import TierReports

WORKER = Register(
    "sim", "m", "host", 1, "hash", "float32", tensor_parallel_sizes=(1, 2, 4), max_pipeline_parallel_size=4
)
LOADED = Loaded("hash", 100, 512, 64, 1000)


class ScriptedGroup(WorkerGroup):
    """A group whose workers are named by one letter, with shorthands for messages of several workers."""

    def register(self, *names: str, at: float = 0.0, **changes: object) -> list[Action]:
        for name in names:
            message = msgspec.structs.replace(WORKER, rendezvous=f"{name}:1", **changes)
            self.on_message(name.encode(), message, at)
        return self.actions()

    def send(self, names: str, message: WorkerMessage | StepFault, at: float = 0.0) -> list[Action]:
        for name in names:
            self.on_message(name.encode(), message, at)
        return self.actions()

    def step(self, step_id: int, began: float, ended: float, size: StepSize = SMALLEST) -> None:
        """A step of epoch 1."""
        self.on_dispatch(step_id, began, size)
        self.on_result(1, step_id, ended)

    def lose(self, name: str, at: float) -> list[Action]:
        self.on_gone(name.encode(), "is gone", at)
        return self.actions()

    def drop(self) -> list[Action]:
        self.on_drop(b"name")
        return self.actions()

    def check_at(self, now: float) -> list[Action]:
        self.check(now)
        return self.actions()

    def actions(self) -> list[Action]:
        """All but the news."""
        return [action for action in self.take_actions() if not isinstance(action, News)]

    def serve(self, *names: str, at: float = 0.0) -> Started:
        """From registration to the epoch in effect."""
        self.register(*names, at=at)
        return self.start(at)

    def start(self, at: float = 0.0) -> Started:
        """From the assignment to the epoch in effect."""
        ranks = "".join(member.peer.decode() for member in self.roster.ranks)
        self.load(ranks, at)
        return self.ready(ranks, at)

    def load(self, names: str, at: float = 0.0, **changes: object) -> list[Action]:
        """The weights are loaded."""
        return self.send(names, msgspec.structs.replace(LOADED, epoch=self.epoch, **changes), at)

    def ready(self, names: str, at: float = 0.0) -> Started:
        """The last ranks are ready."""
        *_, started = self.send(names, Ready(self.epoch), at)
        assert isinstance(started, Started)
        return started

    @property
    def names(self) -> str:
        """The registered workers."""
        return "".join(member.peer.decode() for member in self.roster)

    def member_state(self, name: str) -> MemberState:
        return self.roster.state_of(name.encode())


def group(**config: object) -> ScriptedGroup:
    return ScriptedGroup(SchedulerConfig.model_validate(config))


def registered(*names: str, **config: object) -> ScriptedGroup:
    """Return a group at which these workers have registered."""
    made = group(**config)
    made.register(*names)
    return made


def serving(*names: str, **config: object) -> ScriptedGroup:
    """Return a group that serves with these workers."""
    made = group(**config)
    made.serve(*names)
    return made


def sent(actions: list[Action], kind: type) -> dict[str, object]:
    return {a.peer.decode(): a.message for a in actions if isinstance(a, Send) and isinstance(a.message, kind)}


def test_ranks_are_handed_out_when_the_last_one_needed_has_come() -> None:
    g = group(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert g.register("a", "b", "c") == []
    assert g.status.detail == "waiting for workers: 3 of 4 have registered"
    assignments = sent(g.register("d"), Assignment)
    assert {n: (a.rank, a.world_size, a.epoch, a.rendezvous) for n, a in assignments.items()} == {
        name: (rank, 4, 1, "a:1") for rank, name in enumerate("abcd")
    }
    assert assignments["c"].shard == Shard(0, 2, 1, 2)
    assert assignments["c"].output_rank == 2


def test_a_tensor_parallel_group_shares_a_machine_whatever_the_order_of_registration() -> None:
    g = group(tensor_parallel_size=2, pipeline_parallel_size=2)
    machines = {"a": "h1", "b": "h2", "c": "h3", "d": "h2"}
    for name, machine in machines.items():
        g.on_message(name.encode(), msgspec.structs.replace(WORKER, rendezvous=f"{machine}:{ord(name)}"), 0.0)
    assignments = sent(g.actions(), Assignment)
    assert {name: a.rank for name, a in assignments.items()} == {"b": 0, "d": 1, "a": 2, "c": 3}
    assert {a.rendezvous for a in assignments.values()} == {f"h2:{ord('b')}"}


def test_all_get_the_least_that_any_can_hold_and_serve_when_all_are_ready() -> None:
    g = registered("a", "b", tensor_parallel_size=2)
    assert g.load("a", num_blocks=700) == []
    assert sent(g.load("b", num_blocks=300), InitializeCache) == {
        "a": InitializeCache(300, 512, epoch=1, whole_steps=True),
        "b": InitializeCache(300, 512, epoch=1, whole_steps=True),
    }
    assert g.send("a", Ready(1)) == []
    started = g.ready("b")
    assert (started.peers, started.limits.num_blocks, g.status.phase) == ([b"a", b"b"], 300, EnginePhase.READY)


def test_lost_rank_ends_the_epoch_and_a_spare_takes_its_place_at_once() -> None:
    g = serving("a", "b", tensor_parallel_size=2)
    assert g.register("c") == []  # a spare
    ends = sent(actions := g.lose("b", 1.0), EndEpoch)
    assert ends == {"a": EndEpoch(1, "worker host:1 is gone")}
    assert Ended(1, "worker host:1 is gone") in actions
    assert g.status.phase is EnginePhase.RECOVERING
    assignments = sent(g.register("a", at=1.1, epoch=1, shard=Shard(0, 2)), Assignment)
    assert {n: (a.rank, a.epoch) for n, a in assignments.items()} == {"a": (0, 2), "c": (1, 2)}
    assert g.start(1.2).epoch == 2


def test_each_worker_that_comes_or_is_lost_is_news() -> None:
    g = group()
    g.on_message(b"a", WORKER, 0.0)
    g.on_message(b"b", WORKER, 0.0)
    g.on_message(b"b", WORKER, 1.0)  # again, as after an epoch: no news
    g.on_gone(b"b", "is gone", 2.0)
    assert [action.text for action in g.take_actions() if isinstance(action, News)] == [
        "worker host:1 has registered; workers: 1",
        "worker host:1 has registered; workers: 2",
        "worker host:1 is gone; workers: 1",
    ]


def test_a_worker_with_a_rank_s_weights_gets_that_rank_again() -> None:
    g = serving("a", "b", tensor_parallel_size=2)
    g.register("c")
    g.lose("a", 1.0)
    assignments = sent(g.register("b", at=1.1, epoch=1, shard=Shard(1, 2)), Assignment)
    assert {n: a.rank for n, a in assignments.items()} == {"b": 1, "c": 0}


def test_rank_that_lost_another_is_well_and_only_the_epoch_ends() -> None:
    g = serving("a", "b", tensor_parallel_size=2)
    g.send("b", RankLost(1, "connection reset"), 1.0)
    assert {member.state for member in g.roster} == {MemberState.RETURNING}
    g.register("a", "b", at=1.1)
    assert g.start(1.2).epoch == 2


def test_silent_worker_is_lost_and_may_come_back() -> None:
    g = serving("a", heartbeat_timeout_seconds=5)
    g.send("a", Heartbeat(1, 7), 10.0)
    g.check(14.9)
    assert g.status.phase is EnginePhase.READY
    assert [type(a) for a in g.check_at(15.1)] == [Ended, Send]
    assert not g.names
    assert sent(g.register("a", at=40.0, epoch=1), Assignment)["a"].epoch == 2


def signs_of_life(g: ScriptedGroup, count: int, at: float, plans: bool = True, results: bool = True) -> list[Action]:
    """Send signs of life, one a second. "a" answers on the connections that are True.

    Return the actions of the checks after each.
    """
    actions = []
    for second in range(count):
        sign, now = g.on_sign_of_life(), at + second
        if plans:
            g.on_pong(b"a", sign)
        heard = sign if results else g.roster[b"a"].answers.results
        actions += g.send("a", Heartbeat(g.epoch, 0, answers=heard), now)
        actions += g.check_at(now)
    return actions


@pytest.mark.parametrize(("plans", "results"), [(False, True), (True, False), (False, False)])
def test_a_rank_that_does_not_hear_the_scheduler_is_given_up(plans: bool, results: bool) -> None:
    """Its heartbeats arrive, but it receives nothing on one of its connections."""
    g = group(heartbeat_timeout_seconds=5)
    signs_of_life(g, 100, 0.0)
    g.serve("a", at=100.0)
    assert g.unanswered == [0.0]
    assert signs_of_life(g, 10, 100.0) == []
    assert g.unanswered == [0.0]
    assert signs_of_life(g, 6, 110.0, plans, results) == []
    assert g.unanswered == [5.0]
    assert [type(a) for a in signs_of_life(g, 1, 116.0, plans, results)] == [Ended, Send]
    assert not g.names
    assert g.unanswered == []


def test_a_rank_may_read_no_plan_during_a_step_and_not_after_it() -> None:
    g = serving("a", heartbeat_timeout_seconds=5)
    g.on_dispatch(1, 0.0)
    assert signs_of_life(g, 50, 0.0, plans=False) == []
    assert g.unanswered == [0.0]
    g.on_result(1, 1, 50.0)
    assert signs_of_life(g, 6, 50.0, plans=False) == []
    assert [type(a) for a in signs_of_life(g, 1, 56.0, plans=False)] == [Ended, Send]


def test_a_pause_of_the_scheduler_is_no_silence_of_a_rank() -> None:
    """Signs count, not seconds: when it goes on, it reads heartbeats that answer a sign from before the pause."""
    g = serving("a", heartbeat_timeout_seconds=5)
    signs_of_life(g, 3, 0.0)
    g.send("a", Heartbeat(1, 0, answers=2), 100.0)
    assert g.check_at(100.0) == []
    assert signs_of_life(g, 3, 100.0) == []


def test_ranks_that_fall_silent_together_are_lost_together() -> None:
    g = serving("a", "b", tensor_parallel_size=2, heartbeat_timeout_seconds=5)
    g.check(6.0)
    assert not g.names


@pytest.mark.parametrize(("timeout", "excused"), [(5.0, LOAD_SILENCE), (60.0, 60.0)])
def test_loading_excuses_a_longer_silence(timeout: float, excused: float) -> None:
    g = registered("a", heartbeat_timeout_seconds=timeout)
    g.check(excused - 1)
    assert g.names
    g.check(excused + 1)
    assert not g.names


def test_worker_stuck_in_its_old_epoch_is_given_up() -> None:
    g = serving("a", "b", tensor_parallel_size=2, step_timeout_seconds=1.0)
    g.on_dispatch(9, 0.0)
    g.send("a", Heartbeat(1, 9), 0.5)
    g.send("b", Heartbeat(1, 8), 0.5)
    assert g.check_at(0.9) == []
    assert Ended(1, "step 9 has not ended on rank 1 after 1.1 s, far longer than steps of its size take") in g.check_at(
        1.1
    )
    g.register("b", at=1.1)
    g.send("a", Heartbeat(1, 8), 1.0 + RETURN_TIMEOUT)
    g.check(1.2 + RETURN_TIMEOUT)
    assert g.names == "b"


def test_a_spare_that_hangs_is_given_up_and_the_next_one_takes_its_rank() -> None:
    """Its heartbeats arrive, but do not carry the epoch that it was assigned to."""
    g = serving("a", "b", tensor_parallel_size=2)
    g.register("c", "d", at=1.0)
    assert sent(g.lose("b", 2.0), Assignment).keys() == {"c", "d"}
    g.register("a", at=2.1)
    g.send("a", Heartbeat(0, 0), 2.0 + ASSIGN_TIMEOUT)
    g.send("c", Heartbeat(0, 0), 2.0 + ASSIGN_TIMEOUT)
    g.send("d", Heartbeat(2, 0), 2.0 + ASSIGN_TIMEOUT)
    assert g.check_at(2.0 + ASSIGN_TIMEOUT) == []
    g.send("c", Heartbeat(0, 0), 2.1 + ASSIGN_TIMEOUT)
    assert sent(g.check_at(2.1 + ASSIGN_TIMEOUT), EndEpoch).keys() == {"c", "d"}
    assert sent(g.register("d", at=2.2 + ASSIGN_TIMEOUT), Assignment).keys() == {"a", "d"}


@pytest.mark.parametrize("message", [Heartbeat(1, 0), LoadProgress("weights", 0.5)])
def test_loading_may_take_long_once_it_has_begun(message: WorkerMessage) -> None:
    g = registered("a")
    g.send("a", message, 1.0)
    g.send("a", Heartbeat(1, 0), 10 * ASSIGN_TIMEOUT)
    g.check(10 * ASSIGN_TIMEOUT)
    assert g.start(10 * ASSIGN_TIMEOUT).epoch == 1


def test_a_worker_that_has_not_confirmed_its_assignment_may_be_silent_as_long_as_one_that_loads() -> None:
    """Imports can hold up its heartbeat thread."""
    g = registered("a")
    g.send("a", Heartbeat(0, 0), 0.5)
    g.check(LOAD_SILENCE)
    g.send("a", Heartbeat(1, 0), LOAD_SILENCE)
    g.check(LOAD_SILENCE)
    assert g.start(LOAD_SILENCE).epoch == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_hash": "other"}, "model hash mismatch: this worker has 'other', the group 'hash'"),
        ({"model_hash": "other"}, "with --performance-mode throughput all of them AMX, or none"),
        ({"dtype": "bfloat16"}, "dtype mismatch: this worker has 'bfloat16', the group 'float32'"),
        ({"backend": "native"}, "backend mismatch: this worker has 'native', the group 'sim'"),
        ({"tensor_parallel_sizes": (1, 3)}, "--tensor-parallel-size 2: the model can be cut into 1, 3"),
        ({"max_pipeline_parallel_size": 1}, "the model can be cut into at most 1 stages"),
        (
            {"tensor_parallel_sizes": (1,), "single_rank": "it has one GPU"},
            "--tensor-parallel-size 2 --pipeline-parallel-size 2: it has one GPU",
        ),
    ],
)
def test_worker_that_does_not_fit_is_refused_with_both_values(changes: dict[str, object], reason: str) -> None:
    g = registered("a", tensor_parallel_size=2, pipeline_parallel_size=2)
    (refusal,) = g.register("b", **changes)
    assert isinstance(refusal, Refuse)
    assert reason in refusal.reason
    assert g.names == "a"


def test_a_worker_that_can_only_be_alone_is_a_group_of_one() -> None:
    for size in (1, "auto"):
        g = group(tensor_parallel_size=size)
        assert not any(isinstance(action, Refuse) for action in g.register("a", single_rank="it has one GPU"))
        assert g.names == "a"


def loaded_parts(epoch: int, **parts: str) -> Loaded:
    return msgspec.structs.replace(LOADED, epoch=epoch, contents=parts)


@pytest.mark.parametrize(("theirs", "fits"), [("same", True), ("", True), ("other", False)])
def test_a_worker_whose_model_has_another_tokenizer_is_refused(theirs: str, fits: bool) -> None:
    g = ScriptedGroup(SchedulerConfig(), tokenizer="same")
    actions = g.register("a", tokenizer=theirs)
    reason = next((action.reason for action in actions if isinstance(action, Refuse)), "")
    assert g.names == ("a" if fits else "")
    assert ("the digest other, that of the scheduler's same; give both the same --model" in reason) != fits


def test_rank_with_other_weights_is_refused_and_named() -> None:
    """The registrations agree: the weights' contents are known only after they are loaded."""
    g = registered("a", "b", "c", tensor_parallel_size=2)
    g.send("a", loaded_parts(g.epoch, norm="1", left="2"))
    actions = g.send("b", loaded_parts(g.epoch, norm="9", right="3"))
    (refusal,) = [action for action in actions if isinstance(action, Refuse)]
    assert refusal == Refuse(b"b", "weights mismatch: norm has the digest 9, and 1 on the other workers")
    assert g.names == "ac"
    assert "other weights" in g.status.detail
    g.register("a")
    g.send("a", loaded_parts(g.epoch, norm="1", left="2"))
    g.send("c", loaded_parts(g.epoch, norm="1", right="3"))
    g.ready("ac")


def test_replacement_must_have_the_weights_of_the_lost_rank() -> None:
    g = registered("a")
    g.send("a", loaded_parts(g.epoch, whole="1"))
    g.send("a", Ready(g.epoch))
    g.lose("a", 1.0)
    g.register("b", at=2.0)
    (refusal,) = [a for a in g.send("b", loaded_parts(g.epoch, whole="2"), 3.0) if isinstance(a, Refuse)]
    assert "weights mismatch" in refusal.reason
    assert g.names == ""


def test_parts_of_another_size_are_not_compared_and_unknown_workers_add_none() -> None:
    g = group()
    g.send("x", loaded_parts(g.epoch, whole="9"))
    g.register("a")
    g.send("a", loaded_parts(g.epoch, whole="1", half="2"))
    assert g.member_state("a") is MemberState.INITIALIZING


def test_parts_beyond_the_bound_are_not_compared_and_the_log_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.membership.contents.MAX_PARTS", 2)
    g = registered("a", "b", "c", tensor_parallel_size=2)
    g.on_message(b"a", loaded_parts(g.epoch, one="1", two="2", three="3"), 0.0)
    g.on_message(b"b", loaded_parts(g.epoch, one="1", two="9", three="9", four="4"), 0.0)
    actions = list(g.take_actions())
    assert [a.reason for a in actions if isinstance(a, Refuse)] == [
        "weights mismatch: two has the digest 9, and 2 on the other workers"
    ]
    news = [a.text for a in actions if isinstance(a, News) and "are not compared" in a.text]
    assert len(news) == 1


def test_spares_have_a_bound() -> None:
    g = serving("a", max_spare_workers=1)
    g.register("b")
    (refusal,) = g.register("c")
    assert isinstance(refusal, Refuse)
    assert "2 workers: 1 ranks and 1 spares" in refusal.reason


def test_auto_waits_until_membership_settles_and_takes_the_largest_size_allowed() -> None:
    g = group(tensor_parallel_size="auto", settle_seconds=5)
    g.register("a", "b", at=0.0)
    g.register("c", at=3.0)
    assert g.check_at(7.9) == []
    assert {a.world_size for a in sent(g.check_at(8.0), Assignment).values()} == {2}
    assert g.start(8.1).epoch == 1


def test_auto_forms_the_group_anew_when_workers_come_and_when_they_go() -> None:
    g = group(tensor_parallel_size="auto", settle_seconds=5)
    g.register("a", at=0.0)
    g.check(5.0)
    assert g.start(5.1).peers == [b"a"]
    g.register("b", at=10.0)
    g.send("ab", Heartbeat(1, 0), 14.0)
    assert [type(a) for a in g.check_at(15.0)] == [Send, Ended]
    assert g.losses.total == 0, "this is not a fault"
    g.register("a", at=15.1)
    assert len(g.start(15.2).peers) == 2
    g.lose("b", 20.0)
    g.register("a", at=20.1)
    g.check(24.9)
    assert g.status.phase is EnginePhase.RECOVERING
    g.send("a", Heartbeat(2, 0), 24.9)
    g.check(25.0)
    assert g.start(25.1).peers == [b"a"]


def test_worker_that_cannot_load_ends_the_epoch_and_says_why() -> None:
    g = registered("a", "b", tensor_parallel_size=2)
    g.send("b", LoadFailed("tensor x is missing"))
    assert "tensor x is missing" in g.status.detail
    assert g.names == "a"


def test_groups_that_never_serve_are_not_formed_for_ever() -> None:
    g = group()
    g.serve("a")
    g.on_result(g.epoch, 1, 0.5)
    for _ in range(MAX_FUTILE_EPOCHS):  # the first one has finished a step
        g.lose("a", 1.0)
        g.serve("a")
    assert [type(a) for a in g.lose("a", 1.0)] == [Ended]
    g.register("a")
    assert not g.failed
    assert FailRequests in [type(action) for action in g.check_at(1.0)]
    assert g.failed
    assert g.epoch == MAX_FUTILE_EPOCHS + 1
    assert g.status.detail == "5 groups of workers in a row were lost before they served: worker host:1 is gone"


@pytest.mark.parametrize(("seconds", "fails"), [(PROVEN_AFTER - 1, True), (PROVEN_AFTER, False)])
def test_groups_that_were_idle_for_long_are_no_reason_to_give_up(seconds: float, fails: bool) -> None:
    g = group()
    for number in range(MAX_FUTILE_EPOCHS):
        g.serve("a", at=number * 100.0)
        g.lose("a", number * 100.0 + seconds)
    g.check(MAX_FUTILE_EPOCHS * 100.0)
    assert g.failed is fails


@pytest.mark.parametrize(("whole_prompts", "longest"), [(False, 512), (True, 257)])
def test_a_model_that_computes_prompts_in_one_step_has_no_longer_context(whole_prompts: bool, longest: int) -> None:
    g = registered("a", max_num_batched_tokens=256)
    g.load("a", pooling=PoolingModel("embed", 8, whole_prompts))
    limits = g.ready("a").limits
    assert (limits.max_model_len, limits.enable_prefix_caching) == (longest, not whole_prompts)


def test_a_worker_that_has_not_registered_is_expected_until_it_is_stopped() -> None:
    g = serving("a")
    g.lose("a", 1.0)
    g.send("b", Heartbeat(0, 0))
    assert not g.is_stopped
    g.send("b", Heartbeat(0, 0, is_stopped=True))
    assert g.is_stopped


def test_the_last_loss_may_be_explained_before_the_group_gives_up() -> None:
    g = group()
    for _ in range(MAX_FUTILE_EPOCHS):
        g.serve("a")
        g.lose("a", 1.0)
    g.losses.on_explained()
    g.check(1.0)
    assert not g.failed
    g.serve("a")
    assert g.epoch == MAX_FUTILE_EPOCHS + 1


@pytest.mark.parametrize(("config", "changes", "expected"), [
    ({"num_gpu_blocks_override": 1000}, {}, {"num_blocks": 1000}),
    ({}, {"loads_blocks": True}, {"loads_blocks": False}),
    ({}, {"kv_peer": "tcp://a"}, {"fetches_blocks": False}),
    ({"pipeline_parallel_size": 2, "batch_queue_depth": 3,
      "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, {}, {"drafts_in_flight": 6}),
])  # fmt: skip
def test_sizes_are_those_of_all_ranks(
    config: dict[str, object], changes: dict[str, object], expected: dict[str, object]
) -> None:
    """`changes`: what only one of the ranks has."""
    g = registered(*"ab", **{"tensor_parallel_size": 3 - int(config.get("pipeline_parallel_size", 1))} | config)
    g.load("a", **changes)
    g.load("b")
    started = g.ready("ab")
    assert {name: getattr(started.limits, name) for name in expected} == expected
    assert started.kv_peers == ()


def test_an_epoch_is_later_than_every_one_that_a_worker_knows() -> None:
    """The clock may have gone back between two schedulers."""
    g = group()
    g.register("a", epoch=7)
    assert g.epoch == 8


def test_only_the_rank_that_samples_may_return_results() -> None:
    g = serving("a", "b", tensor_parallel_size=2)
    assert [g.may_return(peer, g.epoch) for peer in (b"a", b"b", b"c")] == [True, False, False]


@pytest.mark.parametrize(("is_idle", "seconds"), [(False, STOP_SETTLE), (True, 0.0)])
def test_ranks_that_a_signal_has_stopped_leave_together(is_idle: bool, seconds: float) -> None:
    """With open requests they leave some time after the first of them was stopped."""
    g = serving("a", "b", tensor_parallel_size=2)
    for name, at in (("a", 10.0), ("b", 11.0), ("a", 11.5)):
        g.send(name, Heartbeat(1, 0, is_stopped=True), at)
    if not is_idle:
        g.release_stopped(11.9, is_idle)
        assert g.actions() == []
    g.release_stopped(10.0 + seconds, is_idle)
    assert sent(g.actions(), Shutdown).keys() == {"a", "b"}
    assert (g.names, g.is_stopped) == ("", True)
    g.serve("c", "d", at=12.0)
    assert not g.is_stopped


def test_more_blocks_than_the_workers_hold_are_refused_by_flag() -> None:
    g = registered("a", num_gpu_blocks_override=2000)
    actions = g.load("a", num_blocks=1000)
    error = "--num-gpu-blocks-override 2000: the workers can hold 1000 blocks; raise --kv-cache-memory-bytes"
    assert sent(actions, Shutdown) == {"a": Shutdown(error)}
    assert g.status[:2] == (EnginePhase.FAILED, error)


@pytest.mark.parametrize(
    ("drafter", "lookahead"),
    [
        ({"method": "ngram"}, 0),
        ({"method": "eagle"}, 3),
        ({"method": "eagle", "model": "head"}, 3),
        ({"method": "draft_model", "model": "smaller"}, 3),
    ],
)
def test_a_drafter_with_keys_and_values_of_its_own_has_room_for_drafts(drafter: dict[str, str], lookahead: int) -> None:
    """A head without a name, as the demo model's, included."""
    speculative = drafter | {"num_speculative_tokens": 3}
    config = SchedulerConfig.model_validate({"speculative_config": speculative})
    g = ScriptedGroup(config)
    (assigned,) = (a.message for a in g.register("a") if isinstance(a, Send))
    assert isinstance(assigned, Assignment)
    assert (assigned.speculation.method, assigned.speculation.num_speculative_tokens) == (drafter["method"], 3)
    limits = g.start().limits
    assert limits.lookahead == lookahead
    assert limits.drafts_in_flight == 3 * config.depth


# -- the group's own timeouts and failures -----------------------------------------------------------------------------


def test_open_requests_fail_when_no_group_comes_in_time_and_the_group_goes_on() -> None:
    g = serving("a", recovery_timeout_seconds=20)
    g.lose("a", 10.0)
    assert g.check_at(30.0) == []
    (action,) = g.check_at(30.1)
    assert isinstance(action, FailRequests)
    assert g.status.phase is EnginePhase.WAITING_FOR_WORKERS
    assert g.check_at(60.0) == [], "once only"
    assert g.serve("b", at=61.0).epoch == 2


def test_the_recovery_timeout_goes_on_while_the_next_group_loads() -> None:
    g = serving("a", recovery_timeout_seconds=20)
    g.lose("a", 10.0)
    g.register("b", at=25.0)
    assert g.status.phase is EnginePhase.RECOVERING
    (action,) = g.check_at(30.1)
    assert isinstance(action, FailRequests)
    assert g.status.phase is EnginePhase.LOADING
    assert g.start(31.0).epoch == 2


def test_the_recovery_timeout_begins_anew_with_each_epoch_in_effect() -> None:
    g = serving("a", recovery_timeout_seconds=20)
    g.lose("a", 10.0)
    g.serve("b", at=25.0)
    g.send("b", Heartbeat(2, 0), 39.0)
    assert g.check_at(40.0) == []
    g.lose("b", 41.0)
    assert g.check_at(60.0) == []
    assert [type(a) for a in g.check_at(61.1)] == [FailRequests]


def test_a_group_none_of_whose_ranks_makes_progress_is_given_up() -> None:
    g = registered("a", "b", tensor_parallel_size=2)
    g.send("ab", Heartbeat(1, 0), 1.0)
    g.send("a", LoadProgress("weights", 0.5), 100.0)
    assert g.status.progress == 0.25
    g.send("ab", Heartbeat(1, 0), 100.0 + LOAD_STALL)
    assert g.check_at(100.0 + LOAD_STALL) == []
    ends = sent(g.check_at(100.1 + LOAD_STALL), EndEpoch)
    assert ends == {name: EndEpoch(1, "no rank made progress for 1800 s: weights") for name in "ab"}


def test_a_group_that_hangs_while_it_loads_is_given_up_soon() -> None:
    """The heartbeats arrive, but no rank uses processor time."""
    g = registered("a", "b", tensor_parallel_size=2)
    for now in range(1, 500):  # rank a works without a report, rank b waits for it
        g.send("a", Heartbeat(1, 0, work=5.0 + 0.01 * now), float(now))
        g.send("b", Heartbeat(1, 0, work=7.0), float(now))
        assert g.check_at(float(now)) == []
    for now in range(500, 605):
        g.send("a", Heartbeat(1, 0, work=10.0), float(now))
        g.send("b", Heartbeat(1, 0, work=7.0), float(now))
        assert g.check_at(float(now)) == []
    g.send("ab", Heartbeat(1, 0, work=10.001), 624.0)
    g.send("ab", Heartbeat(1, 0, work=10.001), 700.0)
    g.send("ab", Heartbeat(1, 0, work=10.002), 744.5)
    ends = sent(g.check_at(744.5), EndEpoch)
    reason = "no rank did any work for 120 s (--load-timeout-seconds): loading m"
    assert ends == {name: EndEpoch(1, reason) for name in "ab"}


def test_a_rank_that_hangs_while_another_has_loaded_is_given_up_soon() -> None:
    """A rank that waits for the others measures no work."""
    g = registered("a", "b", tensor_parallel_size=2)
    g.send("ab", Heartbeat(1, 0, work=5.0), 1.0)
    g.load("a", 2.0)
    for now in range(3, 125):
        g.send("a", Heartbeat(1, 0), float(now))
        g.send("b", Heartbeat(1, 0, work=5.0), float(now))
    ends = sent(g.check_at(124.0), EndEpoch)
    reason = "no rank did any work for 120 s (--load-timeout-seconds): loading m"
    assert ends == {name: EndEpoch(1, reason) for name in "ab"}


def test_a_spare_of_a_lost_scheduler_waits_for_the_rank_with_the_weights() -> None:
    g = group()
    assert g.register("a", at=10.0, returns=True) == []
    assert "weights in memory" in g.status.detail
    assert list(sent(g.register("b", at=11.0, returns=True, shard=Shard()), Assignment)) == ["b"]


def test_a_spare_of_a_lost_scheduler_does_not_wait_for_long_and_only_once() -> None:
    g = group()
    assert g.register("a", at=10.0, returns=True) == []
    assert list(sent(g.check_at(10.0 + RETURN_SECONDS), Assignment)) == ["a"]
    g.start(14.0)
    g.lose("a", 15.0)
    assert list(sent(g.register("b", at=15.1, returns=True), Assignment)) == ["b"]


def out_of_memory(epoch: int, step_id: int) -> RankLost:
    return RankLost(epoch, f"step {step_id} ran out of memory", out_of_memory=True, step_id=step_id)


def test_a_step_without_memory_is_retried_with_half_of_its_tokens_once() -> None:
    """The worker stays; the second loss is a failure like others. The configured limit was far above the step."""
    g = group(max_num_batched_tokens=2048)
    assert g.serve("a").limits.max_num_batched_tokens == 2048
    g.on_dispatch(3, 0.5, StepSize(900, 900 * 900, 2, 899))
    g.on_dispatch(4, 0.5)
    ended = Ended(1, "worker host:1 is well: step 3 ran out of memory", is_fault=False)
    actions = g.send("a", out_of_memory(1, 3), 1.0)
    assert ended in actions
    assert sent(actions, EndEpoch) == {"a": EndEpoch(1, ended.reason, is_fault=False)}
    (assignment,) = sent(g.register("a", at=2.0), Assignment).values()
    assert assignment.max_num_batched_tokens == 448
    limits = g.start(3.0).limits
    assert (limits.max_num_batched_tokens, limits.max_num_seqs) == (448, 256)
    g.on_dispatch(1, 3.5, StepSize(448, 448 * 448, 1, 448))
    (again,) = [a for a in g.send("a", out_of_memory(2, 1), 4.0) if isinstance(a, Ended)]
    assert again.is_fault
    g.register("a", at=5.0)
    assert g.start(5.0).limits.max_num_batched_tokens == 448
    g.send("a", Heartbeat(3, 0), 99.0)
    g.on_dispatch(1, 99.0, StepSize(300, 300 * 300, 1, 300))
    (later,) = [a for a in g.send("a", out_of_memory(3, 1), 99.0) if isinstance(a, Ended)]
    assert not later.is_fault, "after a minute it is retried with smaller steps again"
    g.register("a", at=100.0)
    assert g.start(100.0).limits.max_num_batched_tokens == 144


@pytest.mark.parametrize(("drafts", "size"), [(0, StepSize(40, 4000, 40, 1)), (3, StepSize(100, 9000, 40, 4))])
def test_a_batch_that_decodes_without_memory_is_retried_with_half_of_its_rows(drafts: int, size: StepSize) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": drafts} if drafts else None
    g = serving("a", speculative_config=speculative)
    g.on_dispatch(7, 0.5, size)
    (ended,) = [a for a in g.send("a", out_of_memory(1, 7), 1.0) if isinstance(a, Ended)]
    assert not ended.is_fault
    (assignment,) = sent(g.register("a", at=2.0), Assignment).values()
    assert assignment.num_slots == 40
    limits = g.start(3.0).limits
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (20, 2048)


@pytest.mark.parametrize("size", [StepSize(), StepSize(20, 400, 1, 20)])
def test_a_step_without_memory_that_cannot_be_halved_is_a_failure(size: StepSize) -> None:
    g = serving("a")
    g.on_dispatch(1, 0.5, size)
    (ended,) = [a for a in g.send("a", out_of_memory(1, 1), 1.0) if isinstance(a, Ended)]
    assert ended.is_fault


def test_steps_that_take_long_raise_the_limit_of_later_ones() -> None:
    g = serving("a", step_timeout_seconds=1.0)
    g.step(1, 0.0, 0.9)
    g.on_dispatch(2, 1.0)
    g.send("a", Heartbeat(1, 1), 9.0)
    assert g.check_at(9.9) == []
    assert [type(a) for a in g.check_at(10.1)] == [Send, Ended]


def test_a_hung_step_is_noticed_soon_when_steps_of_its_size_were_measured() -> None:
    g = serving("a")
    for step in range(1, 4):
        g.step(step, step, step + 0.02)
    g.on_dispatch(4, 10.0)
    g.send("a", Heartbeat(1, 3), 14.0)
    assert g.check_at(10.0 + FLOOR) == []
    assert [type(a) for a in g.check_at(10.1 + FLOOR)] == [Send, Ended]


def test_the_first_step_of_a_size_may_compile() -> None:
    """Small steps were measured; the first large one has the limit of a first step, and the next one has not."""
    g, large = group(heartbeat_timeout_seconds=10000.0), StepSize(2048, 2048 * 2048)
    g.serve("a")
    g.step(1, 0.0, 0.001)
    g.on_dispatch(2, 1.0, large)
    assert g.check_at(60.0) == []
    g.on_result(1, 2, 60.0)
    for step in range(3, 1000):  # the time of the compilation decays
        g.step(step, 60.0 + step, 60.1 + step, large)
    g.on_dispatch(1000, 2000.0, large)
    assert g.check_at(2000.0 + FLOOR) == []
    assert [type(a) for a in g.check_at(2000.2 + FLOOR)] == [Send, Ended]


def test_a_hung_step_of_a_new_size_is_noticed_although_small_steps_were_slow() -> None:
    """From one position to 512, all of the time would be multiplied, also what every step takes."""
    g = serving("a", heartbeat_timeout_seconds=10000.0)
    g.step(1, 0.0, 1.0)
    g.on_dispatch(2, 1.0, StepSize(512, 512 * 512))
    assert g.check_at(1.0 + STRETCH * 60.0) == []
    assert [type(a) for a in g.check_at(1.1 + STRETCH * 60.0)] == [Send, Ended]


def test_a_long_context_may_take_longer_than_a_short_one() -> None:
    """The same number of positions, behind a cached prefix of 64 times as much to attend to."""
    g = serving("a", heartbeat_timeout_seconds=10000.0)
    for step in range(1, 10):
        g.step(step, float(step), step + 0.5, StepSize(512, 512 * 512))
    g.on_dispatch(10, 100.0, StepSize(512, 64 * 512 * 512))
    assert g.check_at(100.0 + 10 * 64 * 0.5) == []
    assert g.check_at(102.0 + 10 * 64 * 0.5) != []


def test_the_limits_are_those_of_the_workers_that_serve() -> None:
    """The next epoch has other workers, and their first steps may compile."""
    g = serving("a", heartbeat_timeout_seconds=10000.0)
    g.step(1, 0.0, 0.01)
    g.lose("a", 1.0)
    g.serve("b", at=2.0)
    g.on_dispatch(1, 3.0)
    assert g.check_at(62.0) == []
    assert g.check_at(64.0) != []


def test_a_result_of_an_old_epoch_neither_ends_a_step_nor_proves_the_epoch() -> None:
    g = serving("a", step_timeout_seconds=1.0)
    g.lose("a", 1.0)
    g.on_result(1, 1, 1.1)
    g.serve("b", at=2.0)
    g.on_dispatch(1, 2.0)
    g.on_result(1, 1, 2.5)
    assert g.losses.futile == 1
    assert [type(a) for a in g.check_at(3.1)] == [Send, Ended]


def test_a_worker_whose_result_contradicts_its_plan_is_turned_away() -> None:
    g = serving("a")
    g.on_impossible_result(b"a", "step 7 has other rows", 1.0)
    assert g.actions() == [
        Refuse(b"a", "step 7 has other rows"),
        Ended(1, "worker host:1 sent an impossible result: step 7 has other rows"),
    ]


def test_a_rank_that_registers_again_by_itself_ends_the_epoch_for_the_others() -> None:
    g = serving("a", "b", tensor_parallel_size=2)
    assert sent(g.register("a", at=1.0), EndEpoch) == {"b": EndEpoch(1, "worker host:1 registered again")}
    assert sent(g.register("b", at=1.1), Assignment).keys() == {"a", "b"}


def test_a_member_that_registers_as_something_else_is_lost_and_refused() -> None:
    g = serving("a", "b", tensor_parallel_size=2)
    actions = g.register("a", at=1.0, dtype="bfloat16")
    assert [type(a) for a in actions] == [Send, Ended, Refuse]
    assert g.names == "b"


def test_a_worker_that_fails_before_it_registers_is_shown() -> None:
    g = group()
    g.send("a", LoadFailed("tensor x is missing"))
    g.check(0.0)
    assert g.status.detail == "waiting for a worker to register (a worker cannot serve: tensor x is missing)"


def test_the_longest_error_of_a_worker_can_be_sent_on() -> None:
    g = serving("a", "b", tensor_parallel_size=2)
    end = sent(g.send("a", StepFault(1, 7, "x" * MAX_TEXT)), EndEpoch)["b"]
    assert Decoder(GroupMessage).decode(encode(end)) == end
    state = EngineState(g.status.phase, g.status.detail)
    assert "failed in step 7: xxx" in g.status.detail
    assert Decoder(EngineMessage).decode(encode(state)) == state


@pytest.mark.parametrize("shard", [Shard(0, 1, 3, 1), Shard(5, 1, 0, 1), Shard(0, 0, 0, 0)])
def test_a_worker_with_an_impossible_shard_gets_a_rank_as_others_do(shard: Shard) -> None:
    assert sent(group().register("a", shard=shard), Assignment).keys() == {"a"}


def test_a_group_that_failed_takes_no_events() -> None:
    g = serving("a")
    g.fail("no policy fits", 1.0)
    assert [type(a) for a in g.actions()] == [Ended, FailRequests, Send]
    assert g.state is EnginePhase.FAILED
    assert g.register("b", at=2.0) == g.lose("a", 3.0) == g.check_at(1000.0) == []
    g.fail("again", 1001.0)
    assert g.actions() == []
    assert g.status.detail == "no policy fits"


def test_all_workers_are_sent_away_when_the_scheduler_ends() -> None:
    g = serving("a")
    g.register("b")
    g.shut_down("the scheduler is stopping")
    assert g.actions() == [Send(name, Shutdown("the scheduler is stopping"), everywhere=True) for name in (b"a", b"b")]


def test_only_auto_has_a_group_that_forms_by_the_passing_of_time() -> None:
    explicit, auto = group(), group(tensor_parallel_size="auto", settle_seconds=5)
    for g in (explicit, auto):
        assert not g.settling
        g.register("a")
    assert (explicit.settling, auto.settling) == (False, True)
    auto.check_at(5.0)
    assert not auto.settling


def test_only_blocks_that_all_ranks_hold_are_adopted() -> None:
    g = registered("a", "b", tensor_parallel_size=2)

    def held(**blocks: str) -> NamedBlocks:
        return NamedBlocks.from_lists(
            [int(block[1:]) for block in blocks], [name.encode() * NAME_BYTES for name in blocks.values()]
        )

    g.load("a", num_blocks=6, held=held(b4="p", b0="q", b1="r", b2="s", b6="t"))
    actions = g.load("b", num_blocks=6, held=held(b0="q", b1="x", b4="p", b6="t", b3="u"))
    inits = sent(actions, InitializeCache)
    assert {init.canary_block for init in inits.values() if isinstance(init, InitializeCache)} == {1}
    assert g.ready("ab").held == held(b4="p", b0="q"), "in the order of rank 0, and none beyond the cache"


@pytest.mark.parametrize("is_next_scheduler", [False, True])
@pytest.mark.parametrize(("first", "other"), [(1, 1), (0, 1), (1, 0), (0, 0), (1, 2), (9, 9)])
def test_blocks_in_memory_that_has_missed_a_drop_are_not_adopted(
    first: int, other: int, is_next_scheduler: bool
) -> None:
    """`first` and `other`: the epoch of the last drop that the memory of the ranks has had. The next scheduler knows
    only this. That of a scheduler whose clock was ahead says nothing."""
    g = registered("a", "b", tensor_parallel_size=2)
    g.lose("a", 0.5)
    g.register("b", "c")
    if not is_next_scheduler:
        g = serving("a", "b", tensor_parallel_size=2)
        g.register("c")
        assert g.drop() == [Send(b"c", LoadBlocks(1, 0, 0, b"", b"", dropped=b"name", drops_all=True))]
        g.lose("a", 1.0)
        g.register("b")
    held = NamedBlocks.from_lists([0], [b"p" * NAME_BYTES])
    g.load("b", held=held, dropped_in=first)
    inits = sent(g.load("c", held=held, dropped_in=other), InitializeCache)
    last = max(epoch for epoch in (first, other, int(not is_next_scheduler)) if epoch <= g.epoch)
    assert [init.dropped_in for init in inits.values() if isinstance(init, InitializeCache)] == [last, last]
    assert g.ready("bc").held == (held if first == other == last else None)


@pytest.mark.parametrize("epochs", [(7, 8), (8, 7), (None, 8), (8, None)])
def test_the_latest_pins_go_on(epochs: tuple[int | None, int | None]) -> None:
    """A worker that was a spare in the last epoch has those of the epoch before."""
    g = registered("a", "b", tensor_parallel_size=2)
    for name, epoch in zip("ab", epochs, strict=True):
        pins = None if epoch is None else KeepPins(epoch, 16, [KeptPin(f"of {epoch}", "", bytes(NAME_BYTES))])
        g.load(name, pins=pins)
    pins = g.ready("ab").pins
    assert pins is not None
    assert pins.epoch == 8


def test_the_test_step_takes_a_block_if_all_are_held() -> None:
    g = registered("a")
    held = NamedBlocks.from_lists([1, 0], [b"p" * NAME_BYTES, b"q" * NAME_BYTES])
    (init,) = sent(g.load("a", num_blocks=2, max_model_len=32, held=held), InitializeCache).values()
    assert isinstance(init, InitializeCache)
    assert init.canary_block == 0, "the one that became whole last"


def test_the_state_is_reported_while_there_are_requests_and_once_more() -> None:
    g, core = registered("a"), EngineCore(Limits(4, 64, 64, 32, 4), ChunkedPolicy(), 1, 50)
    reports = StateReports(SchedulerConfig(), 1, g, StructuredOutput(None, None), TierReports(4))
    reports.report(g.status, None, core)

    def is_due(now: float) -> bool:
        return reports.is_due(now, g.status, core)

    assert not is_due(math.inf)
    core.add(0, GenerateRequest(1, pack([1, 2]), 2, SamplingParams(max_tokens=1)))
    assert (is_due(0.0), is_due(math.inf)) == (False, True)
    core.abort(0, [1])
    assert (is_due(0.0), is_due(0.0)) == (True, False)


def test_engines_of_other_weights_or_factors_of_longrope_are_not_equal() -> None:
    def identity(context: int, longrope: str, **changes: str) -> str:
        g = group()
        g.register("a", **changes)
        g.load("a", num_blocks=2, max_model_len=context, longrope=longrope)
        reports = StateReports(SchedulerConfig(), 1, g, StructuredOutput(None, None), TierReports(16))
        state = reports.state(g.status, g.ready("a"), None)
        assert state.max_model_len == 32
        return state.identity

    assert identity(32, "short") != identity(512, "long")
    assert identity(32, "") == identity(512, ""), "the cache lowers the context, and nothing else depends on it"
    others = [{"backend": "native"}, {"model_hash": "another"}, {"dtype": "bfloat16"}]
    assert len({identity(32, "", **changes) for changes in ({}, *others)}) == 4
