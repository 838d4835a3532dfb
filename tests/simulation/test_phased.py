"""The phased policy on a rigid device that checks its shapes. The rules are checked with every plan in `rigid.py`."""

import os
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from protocol.codec import unpack
from services.scheduler.core.request import Request
from services.scheduler.core.slots import SlotIds
from services.scheduler.policies import SchedulerView, StepBudget
from services.scheduler.policies.phased import PhasedPolicy
from tests.simulation.answer_checks import SimulatedStream
from tests.simulation.rigid import RigidWorld, limits, play
from tests.simulation.world import params

SOAK = os.environ.get("RUNAHEAD_SOAK") == "1"
SEEDS, CHUNK = (320, 40) if SOAK else (26, 26)
SHAPES = ((1, 1), (1, 2), (1, 3), (2, 3), (4, 5))
"""(stages, depth)"""

MUST_HAPPEN = [
    "rollbacks_total",
    "num_preemptions",
    "displacements",
    "stale deliveries",
    "prefix hits",
    "chunked prefills",
    "resumed",
    "paused",
    "results out of order",
    "epochs: ended in flight",
    "late results: epoch ended",
    "aborts: waiting",
    "aborts: prefill in flight",
    "aborts: decode in flight",
    "resets in flight: running=True",
    "stops: stop token",
    "stops: max_tokens",
    "stops: context",
]


def prompt(length: int, first: int = 2) -> list[int]:
    return [(first + i) % 64 for i in range(length)]


def starts(world: RigidWorld, stream: SimulatedStream, slot: int = 0) -> list[tuple[int, int, int]]:
    """Return (generation, start, end) of each row planned for a slot."""
    rows = []
    for plan in world.plans:
        columns = (unpack(c).tolist() for c in (plan.slots, plan.generations, plan.starts, plan.counts))
        rows += [(g, at, at + n) for s, g, at, n in zip(*columns, strict=True) if s == slot]
    return rows


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_any_workload_answers_as_the_reference_and_keeps_every_invariant(first: int) -> None:
    """Per change each workload is played in two of the shapes."""
    happened: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        for stages, depth in SHAPES if SOAK else (SHAPES[seed % 5], SHAPES[(seed + 2) % 5]):
            try:
                world = play(seed, depth, stages)
            except Exception as error:
                pytest.fail(f"play({seed}, {depth}, {stages}): {type(error).__name__}: {error}")
            happened += world.coverage
            happened += world.store.counters
    assert [name for name in MUST_HAPPEN if not happened[name]] == []


# -- interleaving ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_chunks_and_decodes_take_turns_while_there_are_both(depth: int) -> None:
    """Neither starves: each gets every second step."""
    world = RigidWorld(limits(enable_prefix_caching=False), depth)
    world.add(prompt(3), params(40, eos=False))
    while world.streams[0].tokens == []:
        world.step()
    seen = len(world.kinds)
    for length in (24, 24, 24):
        world.add(prompt(length, first=length), params(2, eos=False))
    while any(stream.open for stream in world.streams[1:]):
        world.step()
    kinds = "".join(world.kinds[seen:])
    assert kinds.count("P") == 9
    assert "PP" not in kinds
    assert "DDD" not in kinds.rstrip("D")
    world.drain()


def test_without_interleaving_prefills_go_first() -> None:
    world = RigidWorld(limits(), 2, interleave=False)
    world.add(prompt(3), params(20, eos=False))
    while not world.streams[0].tokens:
        world.step()
    world.add(prompt(24, first=5), params(2, eos=False))
    seen = len(world.kinds)
    world.step()
    world.step()
    world.step()
    assert "".join(world.kinds[seen:]).startswith("PPP")
    world.drain()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_policy_without_state_plans_the_same(depth: int) -> None:
    """Stateless policy: a policy that is made anew for each call, and called twice, plans the same."""

    def anew() -> PhasedPolicy:
        return PhasedPolicy(limits(), max_volume=100, pausing=True)

    class MadeAnew:
        def begin(self, view: SchedulerView) -> StepBudget:
            anew().order(view)
            anew().begin(view)
            return anew().begin(view)

        def order(self, view: SchedulerView) -> SlotIds:
            anew().begin(view)
            return anew().order(view)

        def admit(self, view: SchedulerView, request: Request, hit: int, count: int) -> tuple[int, int]:
            anew().admit(view, request, hit, count)
            return anew().admit(view, request, hit, count)

    plans = []
    for policy in (anew(), MadeAnew()):
        world = RigidWorld(limits(), depth, max_volume=100, pausing=True, policy=policy)
        for length in (3, 20, 9, 30, 17, 5):
            world.add(prompt(length, first=length), params(14, eos=False))
            world.step()
        world.drain()
        plans.append([(plan.slots, plan.starts, plan.counts) for plan in world.plans])
    assert plans[0] == plans[1]


# -- admission -------------------------------------------------------------------------------------------------------


def test_the_whole_request_is_reserved_and_the_head_waits_for_it() -> None:
    """The first request may need 11 of 16 blocks, so the second (6) waits although many are free, and no request passes
    it."""
    world = RigidWorld(limits(num_blocks=16, enable_prefix_caching=False), 2)
    first = world.add(prompt(5), params(40, eos=False))
    second = world.add(prompt(16, first=9), params(8, eos=False))
    third = world.add(prompt(2, first=30), params(2, eos=False))
    for _ in range(20):
        world.step()
    assert first.open
    assert world.epoch.kv.pool.num_free >= 6
    assert not second.steps
    assert not third.steps
    world.drain()
    assert second.steps
    assert world.store.counters["num_preemptions"] == 0


@pytest.mark.parametrize(("num_blocks", "waits"), [(13, True), (14, False)])
def test_cached_blocks_that_are_computed_again_are_reserved(num_blocks: int, waits: bool) -> None:
    """Whole chunks skip four of five cached blocks. The first request may need 10 blocks, the second 4 more."""
    world = RigidWorld(limits(num_blocks=num_blocks), 2)
    first = world.add(prompt(24), params(16, eos=False))
    while len(first.tokens) < 2:
        world.step()
    second = world.add(prompt(24), params(8, eos=False))
    for _ in range(4):
        world.step()
    assert first.open
    assert (second.steps == 0) is waits
    world.drain()
    assert second.hit == 16


@pytest.mark.parametrize("interleave", [True, False])
def test_a_request_may_take_all_blocks_and_the_whole_context(interleave: bool) -> None:
    world = RigidWorld(limits(num_blocks=16), 2, interleave=interleave, max_volume=68)
    stream = world.add(prompt(30), params(34, eos=False))
    world.drain()
    assert len(stream.tokens) == 34


def test_the_last_chunk_waits_until_the_context_holds_both() -> None:
    """The long request reaches 60 of 64 positions; beside it, the new request would be padded beyond the context."""
    world = RigidWorld(limits(), 2)
    long = world.add(prompt(30), params(30, eos=False))
    while len(long.tokens) < 10:
        world.step()
    late = world.add(prompt(24, first=9), params(30, eos=False))
    while long.open:
        world.dispatch()
        if len(long.tokens) > 16:  # two chunks ran; the last one follows the step that certainly ends the other request
            assert late.steps == (3 if len(long.tokens) >= 29 else 2)
        world.complete()
    world.drain()
    assert late.steps > 3


def test_projections_leave_nothing_to_pausing() -> None:
    """If new requests are delayed, no decode ever pauses; if not, some decodes pause."""
    paused = Counter[bool]()
    for pausing in (False, True):
        for seed in range(30 if SOAK else 6):
            rng = np.random.default_rng(seed)
            world = RigidWorld(
                limits(max_num_seqs=6),
                1 + seed % 3,
                interleave=seed % 2 == 0,
                max_volume=int(rng.integers(68, 200)),
                pausing=pausing,
            )
            for _ in range(10):
                tokens = [int(t) for t in rng.integers(2, 64, rng.integers(1, 20))]
                world.add(tokens, params(int(rng.integers(1, 30)), eos=False))
                for _ in range(int(rng.integers(0, 6))):
                    world.step()
            world.drain()
            paused[pausing] += world.coverage["paused"]
    assert paused[False] == 0
    assert paused[True] > 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_eight_decoders_share_a_small_volume(depth: int) -> None:
    """Some pause, the longest-waiting goes first, and each is served again within a few steps."""
    world = RigidWorld(limits(), depth, max_volume=100, pausing=True)
    streams = [world.add(prompt(3, first=5 * i), params(30, eos=False)) for i in range(8)]
    gaps: Counter[int] = Counter()
    world.drain()
    rows = [set(unpack(plan.slots).tolist()) for plan in world.plans]
    for slot in range(8):
        at = [step for step, slots in enumerate(rows) if slot in slots]
        gaps.update(after - before for before, after in pairwise(at[2:]))
    assert world.coverage["paused"] > 0
    assert max(gaps) <= 5  # 100 // 36 rows at the end: eight of them in four steps
    assert all(len(stream.tokens) == 30 for stream in streams)


def test_paused_decodes_come_before_a_new_request() -> None:
    """Paused decodes come before a new request."""
    world = RigidWorld(limits(), 2, max_volume=80, pausing=True)
    early = [world.add(prompt(8, first=5 * i), params(30, eos=False)) for i in range(4)]
    while not world.coverage["paused"]:
        world.step()
    late = world.add(prompt(3), params(2, eos=False))
    while all(stream.open for stream in early):
        assert not late.steps
        world.step()
    world.drain()


# -- progress -------------------------------------------------------------------------------------------------------


def test_less_progress_with_the_next_chunk_in_flight() -> None:
    """Chunks of 8 and 8 are in flight, and the first ends at 4. The second was formed from a wrong start and is void.
    Its blocks stay, and no position is computed twice."""
    cuts = iter([4])
    world = RigidWorld(limits(), 2, progress=lambda _start, end, _most: next(cuts, end))
    stream = world.add(prompt(16), params(3, eos=False))
    world.dispatch()
    table = list(world.epoch.kv.tables[0])
    world.complete()
    s = world.epoch.slots
    assert (int(s.computed[0]), int(s.inflight[0]), int(s.placeholders[0])) == (4, 0, 0)
    assert world.epoch.kv.tables[0] == table
    world.drain()
    assert starts(world, stream)[:4] == [(1, 0, 8), (1, 8, 16), (2, 4, 8), (2, 8, 16)]
    assert world.store.counters["rollbacks_total"] == 1


def test_the_last_chunk_comes_short_and_returns_no_token() -> None:
    ends = iter([4, 9])
    world = RigidWorld(limits(), 2, progress=lambda _start, end, _most: next(ends, end))
    stream = world.add(prompt(12), params(3, eos=False))
    world.drain()
    assert starts(world, stream)[:3] == [(1, 0, 4), (1, 4, 12), (2, 9, 12)]


# -- prefix cache ----------------------------------------------------------------------------------------------------


def test_blocks_do_not_depend_on_how_a_prompt_was_padded() -> None:
    """24 equal tokens in prompts of different lengths, and so of different chunks, are the same blocks."""
    world = RigidWorld(limits(), 2)
    shared = prompt(24)
    for tail in (1, 5, 2, 8):
        stream = world.add([*shared, *prompt(tail, first=40 + tail)], params(2, eos=False))
        while stream.open:
            world.step()
    assert world.coverage["prefix hits"] == 3
    assert all(stream.hit in (16, 20, 24) for stream in world.streams[1:])
    cached = {world.epoch.kv.pool.hash_of[block] for block in range(128)} - {None}
    assert len(cached) < 6 + 4 * 3  # one block per four tokens of the shared prefix
    world.drain()


def test_only_confirmed_blocks_are_shared() -> None:
    """A device may come less far than planned, so blocks in flight are not cached (confirmed registration)."""
    world = RigidWorld(limits(), 2)
    world.add(prompt(24), params(2, eos=False))
    world.dispatch()
    assert not world.epoch.kv.pool.by_hash
    world.complete()
    assert len(world.epoch.kv.pool.by_hash) == 2
    world.drain()
