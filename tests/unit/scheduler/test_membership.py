"""The group's life by scenario; random ones are in tests/simulation."""

import msgspec
import pytest

from protocol.membership import (
    Assignment,
    EndEpoch,
    Heartbeat,
    InitializeCache,
    Loaded,
    LoadFailed,
    LoadProgress,
    RankLost,
    Ready,
    Register,
    Shard,
)
from protocol.requests import EnginePhase
from services.config import SchedulerConfig
from services.scheduler.membership.group import (
    LOAD_SILENCE,
    MAX_FUTILE_EPOCHS,
    RETURN_TIMEOUT,
    TAKE_TIMEOUT,
    Action,
    Ended,
    Refuse,
    Send,
    Started,
    State,
    WorkerGroup,
)
from services.scheduler.membership.sizes import GroupError

WORKER = Register(
    "sim", "m", "host", 1, "hash", "float32", tensor_parallel_sizes=(1, 2, 4), max_pipeline_parallel_size=4
)
LOADED = Loaded("hash", 100, 512, 64, 1000)


class Group(WorkerGroup):
    """With shorthands; workers are named by one letter."""

    def register(self, *names: str, at: float = 0.0, **changes: object) -> list[Action]:
        for name in names:
            message = msgspec.structs.replace(WORKER, rendezvous=f"{name}:1", **changes)
            self.on_message(name.encode(), message, at)
        return list(self.take_actions())

    def say(self, names: str, message: object, at: float = 0.0) -> list[Action]:
        for name in names:
            self.on_message(name.encode(), message, at)  # type: ignore[arg-type]
        return list(self.take_actions())

    def serve(self, *names: str, at: float = 0.0) -> Started:
        """From registration to the epoch in effect."""
        self.register(*names, at=at)
        return self.go_on(at)

    def go_on(self, at: float = 0.0) -> Started:
        members = "".join(m.peer.decode() for m in self._ranks())
        self.say(members, msgspec.structs.replace(LOADED, epoch=self.epoch), at)
        *_, started = self.say(members, Ready(self.epoch), at)
        assert isinstance(started, Started)
        return started


def group(**config: object) -> Group:
    return Group(SchedulerConfig.model_validate(config))


def sent(actions: list[Action], kind: type) -> dict[str, object]:
    return {
        a.peer.decode(): a.message for a in actions if isinstance(a, Send) and isinstance(a.message, kind)
    }


def test_ranks_are_handed_out_when_the_last_one_needed_has_come() -> None:
    g = group(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert g.register("a", "b", "c") == []
    assert g.detail == "waiting for workers: 3 of 4 have registered"
    assignments = sent(g.register("d"), Assignment)
    assert {n: (a.rank, a.world_size, a.epoch, a.rendezvous) for n, a in assignments.items()} == {
        name: (rank, 4, 1, "a:1") for rank, name in enumerate("abcd")
    }
    assert assignments["c"].shard == Shard(0, 2, 1, 2)
    assert assignments["c"].output_rank == 2


def test_all_get_the_least_that_any_can_hold_and_serve_when_all_are_ready() -> None:
    g = group(tensor_parallel_size=2)
    g.register("a", "b")
    assert g.say("a", replace_blocks(700, 1)) == []
    assert sent(g.say("b", replace_blocks(300, 1)), InitializeCache) == {
        "a": InitializeCache(300, 512),
        "b": InitializeCache(300, 512),
    }
    assert g.say("a", Ready(1)) == []
    (started,) = g.say("b", Ready(1))
    assert isinstance(started, Started)
    assert (started.peers, started.limits.num_blocks, g.phase) == ([b"a", b"b"], 300, EnginePhase.READY)


def replace_blocks(blocks: int, epoch: int) -> Loaded:
    return msgspec.structs.replace(LOADED, num_blocks=blocks, epoch=epoch)


def test_lost_rank_ends_the_epoch_and_a_spare_takes_its_place_at_once() -> None:
    g = group(tensor_parallel_size=2)
    g.serve("a", "b")
    assert g.register("c") == []  # a spare
    ends = sent(actions := [*g_gone(g, "b", 1.0)], EndEpoch)
    assert ends == {"a": EndEpoch(1, "worker host:1 is gone")}
    assert Ended("worker host:1 is gone") in actions
    assert g.phase is EnginePhase.RECOVERING
    assignments = sent(g.register("a", at=1.1, epoch=1, shard=Shard(0, 2)), Assignment)
    assert {n: (a.rank, a.epoch) for n, a in assignments.items()} == {"a": (0, 2), "c": (1, 2)}
    assert g.go_on(1.2).epoch == 2


def g_gone(g: Group, name: str, at: float) -> list[Action]:
    g.on_gone(name.encode(), "is gone", at)
    return list(g.take_actions())


def test_who_comes_and_who_is_lost_is_told_spares_too() -> None:
    g = group()
    g.serve("a")
    g.register("b")
    g.register("b", at=1.0)  # again, as after an epoch: no news
    g_gone(g, "b", 2.0)
    assert g.news == [
        "worker host:1 has registered; there are 1 workers",
        "worker host:1 has registered; there are 2 workers",
        "worker host:1 is gone; there are 1 workers",
    ]


def test_who_has_a_rank_s_weights_gets_that_rank_again() -> None:
    g = group(tensor_parallel_size=2)
    g.serve("a", "b")
    g.register("c")
    g_gone(g, "a", 1.0)
    assignments = sent(g.register("b", at=1.1, epoch=1, shard=Shard(1, 2)), Assignment)
    assert {n: a.rank for n, a in assignments.items()} == {"b": 1, "c": 0}


def test_rank_that_lost_another_is_well_and_only_the_epoch_ends() -> None:
    g = group(tensor_parallel_size=2)
    g.serve("a", "b")
    g.say("b", RankLost(1, "connection reset"), 1.0)
    assert {m.state for m in g.members.values()} == {State.RETURNING}
    g.register("a", "b", at=1.1)
    assert g.go_on(1.2).epoch == 2


def test_what_belongs_to_an_old_epoch_changes_nothing() -> None:
    g = group()
    g.serve("a")
    g.register("a", at=1.0)
    assert g.epoch == 2
    for message in (Ready(1), replace_blocks(1000, 1), RankLost(1, "late")):
        assert g.say("a", message, 1.1) == []
    assert g.members[b"a"].state is State.LOADING


def test_silent_worker_is_lost_and_may_come_back() -> None:
    g = group(heartbeat_timeout_seconds=5)
    g.serve("a")
    g.say("a", Heartbeat(1, 7), 10.0)
    g.check(14.9)
    assert g.phase is EnginePhase.READY
    g.check(15.1)
    actions = list(g.take_actions())
    assert [type(a) for a in actions] == [Ended, Send]
    assert not g.members
    assert sent(g.register("a", at=40.0, epoch=1), Assignment)["a"].epoch == 2


def test_loading_excuses_a_longer_silence() -> None:
    g = group(heartbeat_timeout_seconds=5)
    g.register("a")
    g.check(LOAD_SILENCE - 1)
    assert g.members
    g.check(LOAD_SILENCE + 1)
    assert not g.members


def test_worker_stuck_in_its_old_epoch_is_given_up() -> None:
    g = group(tensor_parallel_size=2)
    g.serve("a", "b")
    g.on_hang("step 9 hangs", 1.0)
    g.register("b", at=1.1)
    g.say("a", Heartbeat(1, 8), 1.0 + RETURN_TIMEOUT)
    g.check(1.1 + RETURN_TIMEOUT)
    assert list(g.members) == [b"b"]


def test_a_spare_that_hangs_is_given_up_and_the_next_one_takes_its_rank() -> None:
    """Its heart beats, but not in the epoch that it was assigned to."""
    g = group(tensor_parallel_size=2)
    g.serve("a", "b")
    g.register("c", "d", at=1.0)
    assert sent(g_gone(g, "b", 2.0), Assignment).keys() == {"c", "d"}
    g.register("a", at=2.1)
    g.say("a", Heartbeat(0, 0), 2.0 + TAKE_TIMEOUT)
    g.say("c", Heartbeat(0, 0), 2.0 + TAKE_TIMEOUT)
    g.say("d", Heartbeat(2, 0), 2.0 + TAKE_TIMEOUT)
    g.check(2.0 + TAKE_TIMEOUT)
    assert list(g.take_actions()) == []
    g.say("c", Heartbeat(0, 0), 2.1 + TAKE_TIMEOUT)
    g.check(2.1 + TAKE_TIMEOUT)
    assert sent(list(g.take_actions()), EndEpoch).keys() == {"c", "d"}
    assert sent(g.register("d", at=2.2 + TAKE_TIMEOUT), Assignment).keys() == {"a", "d"}


@pytest.mark.parametrize("word", [Heartbeat(1, 0), LoadProgress("weights", 0.5)])
def test_loading_may_take_long_once_it_has_begun(word: object) -> None:
    g = group()
    g.register("a")
    g.say("a", word, 1.0)
    g.say("a", Heartbeat(1, 0), 10 * TAKE_TIMEOUT)
    g.check(10 * TAKE_TIMEOUT)
    assert g.go_on(10 * TAKE_TIMEOUT).epoch == 1


def test_silence_before_it_takes_its_rank_is_the_silence_of_loading() -> None:
    """An import may hold up the heartbeat too."""
    g = group()
    g.register("a")
    g.say("a", Heartbeat(0, 0), 0.5)
    g.check(LOAD_SILENCE)
    g.say("a", Heartbeat(1, 0), LOAD_SILENCE)
    g.check(LOAD_SILENCE)
    assert g.go_on(LOAD_SILENCE).epoch == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_hash": "other"}, "model hash mismatch: this worker has 'other', the group 'hash'"),
        ({"dtype": "bfloat16"}, "dtype mismatch: this worker has 'bfloat16', the group 'float32'"),
        ({"backend": "native"}, "backend mismatch: this worker has 'native', the group 'sim'"),
        ({"tensor_parallel_sizes": (1, 3)}, "--tensor-parallel-size 2: the model can be cut into 1, 3"),
        ({"max_pipeline_parallel_size": 1}, "the model can be cut into at most 1 stages"),
    ],
)
def test_worker_that_does_not_fit_is_refused_with_both_values(
    changes: dict[str, object], reason: str
) -> None:
    g = group(tensor_parallel_size=2, pipeline_parallel_size=2)
    g.register("a")
    (refusal,) = g.register("b", **changes)
    assert isinstance(refusal, Refuse)
    assert reason in refusal.reason
    assert list(g.members) == [b"a"]


def test_spares_have_a_bound() -> None:
    g = group(max_spare_workers=1)
    g.serve("a")
    g.register("b")
    (refusal,) = g.register("c")
    assert isinstance(refusal, Refuse)
    assert "2 workers: 1 ranks and 1 spares" in refusal.reason


def test_auto_waits_until_membership_settles_and_takes_the_largest_size_allowed() -> None:
    g = group(tensor_parallel_size="auto", settle_seconds=5)
    g.register("a", "b", at=0.0)
    g.register("c", at=3.0)
    g.check(7.9)
    assert list(g.take_actions()) == []
    g.check(8.0)
    assert {a.world_size for a in sent(list(g.take_actions()), Assignment).values()} == {2}
    assert g.go_on(8.1).epoch == 1


def test_auto_forms_the_group_anew_when_workers_come_and_when_they_go() -> None:
    g = group(tensor_parallel_size="auto", settle_seconds=5)
    g.register("a", at=0.0)
    g.check(5.0)
    assert g.go_on(5.1).peers == [b"a"]
    g.register("b", at=10.0)
    g.say("ab", Heartbeat(1, 0), 14.0)
    g.check(15.0)
    actions = list(g.take_actions())
    assert [type(a) for a in actions] == [Send, Ended]
    assert g.epochs_lost == 0, "this is no fault"
    g.register("a", at=15.1)
    assert len(g.go_on(15.2).peers) == 2
    g_gone(g, "b", 20.0)
    g.register("a", at=20.1)
    g.check(24.9)
    assert g.phase is EnginePhase.RECOVERING
    g.say("a", Heartbeat(2, 0), 24.9)
    g.check(25.0)
    assert g.go_on(25.1).peers == [b"a"]


def test_worker_that_cannot_load_ends_the_epoch_and_says_why() -> None:
    g = group(tensor_parallel_size=2)
    g.register("a", "b")
    g.say("b", LoadFailed("tensor x is missing"))
    assert "tensor x is missing" in g.detail
    assert list(g.members) == [b"a"]


def test_groups_that_never_serve_are_not_formed_for_ever() -> None:
    g = group()
    for _ in range(MAX_FUTILE_EPOCHS - 1):
        g.serve("a")
        g_gone(g, "a", 1.0)
    g.serve("a")
    with pytest.raises(GroupError, match="in a row were lost before they served"):
        g_gone(g, "a", 1.0)
    assert g.epoch == MAX_FUTILE_EPOCHS


def test_a_finished_step_makes_an_epoch_worth_its_while() -> None:
    g = group()
    for _ in range(3 * MAX_FUTILE_EPOCHS):
        g.serve("a")
        g.on_step()
        g_gone(g, "a", 1.0)
    assert g.epochs_lost == 3 * MAX_FUTILE_EPOCHS


def test_more_blocks_than_the_workers_hold_are_refused_by_flag() -> None:
    g = group(num_gpu_blocks_override=2000)
    g.register("a")
    with pytest.raises(GroupError, match="--num-gpu-blocks-override 2000: the workers can hold 1000 blocks"):
        g.say("a", replace_blocks(1000, 1))


@pytest.mark.parametrize(
    ("drafter", "lookahead"),
    [
        ({"method": "ngram"}, 0),
        ({"method": "eagle"}, 3),
        ({"method": "eagle", "model": "head"}, 3),
        ({"method": "draft_model", "model": "smaller"}, 3),
    ],
)
def test_a_drafter_with_keys_and_values_of_its_own_has_room_for_drafts(
    drafter: dict[str, str], lookahead: int
) -> None:
    """Also one that comes without a name, as the demo model's head does."""
    speculative = drafter | {"num_speculative_tokens": 3}
    group = Group(SchedulerConfig(speculative_config=speculative))  # type: ignore[arg-type]
    (assigned,) = (a.message for a in group.register("a") if isinstance(a, Send))
    assert isinstance(assigned, Assignment)
    assert assigned.speculation is not None
    assert (assigned.speculation.method, assigned.speculation.num_speculative_tokens) == (
        drafter["method"],
        3,
    )
    limits = group.go_on().limits
    assert limits.lookahead == lookahead
    assert limits.drafts_in_flight == 3 * group.config.depth
