"""A small model checker: every order of {add, abort, dispatch, complete} of tiny requests; rules are checked after
each.

Known states are not expanded again. States from which no event leads on to a new one, or without requests, are drained
and their answers are compared.
"""

import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest

from protocol.sampling import SamplingParams
from services.scheduler.core.limits import Limits
from services.scheduler.policies import ChunkedPolicy
from tests.simulation.world import World, params


@dataclass(frozen=True)
class InterleavingCase:
    limits: Limits
    prompts: tuple[list[int], ...]
    params: tuple[SamplingParams, ...]
    priorities: tuple[int, ...]
    length: int
    """Number of events before the drain; one fewer per change, which is a third of the states."""
    proves: str
    """Key of `World.coverage` that must have happened on some path."""
    reset: bool = False
    loss: bool = False
    """True: the workers are lost once and replaced."""


SOAK = os.environ.get("RUNAHEAD_SOAK") == "1"
ONCE = ("add", "abort", "reset", "loss")

CASES = {
    # Room for one and a half requests: blocks run short while steps are in flight.
    "kv pressure": InterleavingCase(
        Limits(2, 8, 12, 4, 4), ([2, 3, 4, 5, 6], [7, 8, 9]), (params(5, eos=False),) * 2, (0, 0), 9, "preemptions"
    ),
    # One seat; the later request displaces the first, whose tokens are still delivered. Answers end by EOS or length.
    "displacement": InterleavingCase(
        Limits(1, 8, 16, 8, 4), ([2, 3, 4], [5, 6]), (params(3, 2, 3, 4), params(2)), (1, 0), 10, "displacements"
    ),
    # Equal prompts in chunks, and a cache reset that recomputes what runs.
    "sharing and reset": InterleavingCase(
        Limits(2, 3, 16, 8, 2),
        ([2, 3, 4, 5], [2, 3, 4, 5]),
        (params(2, eos=False),) * 2,
        (0, 0),
        8,
        "resets in flight: running=True",
        reset=True,
    ),
    "workers lost": InterleavingCase(
        Limits(1, 4, 8, 4, 2),
        ([2, 3, 4], [5, 6]),
        (params(2, eos=False),) * 2,
        (1, 0),
        7,
        "resumed in another epoch",
        loss=True,
    ),
    "two stages": InterleavingCase(
        Limits(2, 4, 12, 8, 4, stages=2),
        ([2, 3, 4, 5, 6], [7, 8]),
        (params(3, eos=False),) * 2,
        (0, 0),
        8,
        "chunked prefills",
    ),
    "two stages, workers lost": InterleavingCase(
        Limits(2, 2, 8, 4, 2, stages=2),
        ([2, 3, 4], [5]),
        (params(2, eos=False),) * 2,
        (0, 0),
        7,
        "resumed in another epoch",
        loss=True,
    ),
    "three requests": InterleavingCase(
        Limits(2, 4, 8, 5, 2), ([2, 3], [4], [2, 3, 5]), (params(2, eos=False),) * 3, (0, 0, -1), 7, "displacements"
    ),
}


def _add(world: World, case: InterleavingCase, index: int) -> None:
    world.add(case.prompts[index], case.params[index], number=index, priority=case.priorities[index])


def _abort(world: World, index: int) -> None:
    world.abort(next(stream for stream in world.streams if stream.number == index))


def enabled(
    world: World, case: InterleavingCase, done: frozenset[str]
) -> Iterator[tuple[str, Callable[[World], None]]]:
    """Iterate over the events that may happen next."""
    for index in range(len(case.prompts)):
        if f"add {index}" not in done:
            yield f"add {index}", partial(_add, case=case, index=index)
        elif f"abort {index}" not in done:
            yield f"abort {index}", partial(_abort, index=index)
    if case.loss and "loss" not in done:
        yield "loss", lambda world: world.end_epoch()
    if world.orphans and not world.pending:
        yield "late result", lambda world: world.late_result()
    if world.lost:
        yield "replacement", lambda world: world.start_epoch(world.limits, ChunkedPolicy())
        return
    if world.pipeline.busy:
        yield "tick", lambda world: world.tick()
    if world.engine.has_requests and not world.engine.queue.full:
        yield "dispatch", lambda world: world.dispatch() and None
    if world.pending:
        yield "complete", lambda world: world.complete()
    if case.reset and "reset" not in done and len(world.epoch.running):
        yield "reset", lambda world: world.reset_prefix_cache(reset_running=True)


def fingerprint(world: World, done: frozenset[str]) -> tuple[object, ...]:
    """Return everything that determines what happens next; request numbers stand for requests."""
    epoch, s = world.epoch, world.epoch.slots
    pool, live = epoch.kv.pool, [i for i, state in enumerate(s.state.tolist()) if state]
    return (
        done,
        tuple(
            (i, s.request(i).number, int(s.state[i]), int(s.tokens[i]), int(s.computed[i]), tuple(epoch.kv.tables[i]))
            for i in live
        ),
        tuple((r.number, len(r.token_ids), r.stale_rows) for r in world.store.waiting),
        tuple((tuple(x.slots.tolist()), tuple(x.counts.tolist())) for x in world.engine.queue.steps),
        len(world.pending),
        tuple(pool.blank),
        tuple(pool.cached),
        tuple(pool.by_hash.items()),
        tuple(s.free),
        tuple((x.number, len(x.tokens), x.finish is None, x.aborted) for x in world.streams),
        tuple(epoch.released),
        (world.lost, epoch.number, len(world.orphans), tuple(world.pipeline.ran)),
    )


PER_CHANGE = {(name, 2) for name in CASES} | {("kv pressure", 1)}
"""Depth three multiplies the orders, and those of depth one are few."""


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        pytest.param(
            name, depth + case.limits.stages - 1, marks=() if (name, depth) in PER_CHANGE else (pytest.mark.soak,)
        )
        for name, case in CASES.items()
        for depth in (1, 2, 3)
    ],
)
def test_every_order_of_events_gives_the_same_answers(name: str, depth: int) -> None:
    case = CASES[name]
    start = World(case.limits, depth, vocab=16, use_priority=True)
    frontier: list[tuple[World, frozenset[str], tuple[str, ...]]] = [(start, frozenset(), ())]
    known, ends, happened = {fingerprint(start, frozenset())}, list[tuple[World, tuple[str, ...]]](), Counter[str]()
    for _ in range(case.length if SOAK else case.length - 1):
        following: list[tuple[World, frozenset[str], tuple[str, ...]]] = []
        for world, done, path in frontier:
            world.plans.clear()  # kept for other tests
            before, num_known = pickle.dumps(world, pickle.HIGHEST_PROTOCOL), len(known)
            is_empty, events = not world.engine.has_requests, [*enabled(world, case, done)]
            for number, (event, apply) in enumerate(events, 1):
                after = world if number == len(events) else pickle.loads(before)
                try:
                    apply(after)
                    after.frontends.receive()
                except Exception as error:
                    pytest.fail(f"{type(error).__name__}: {error}\nevents: {[*path, event]}")
                marks = done | {event} if event.split()[0] in ONCE else done
                if (state := fingerprint(after, marks)) not in known:
                    known.add(state)
                    following.append((after, marks, (*path, event)))
            if len(known) == num_known or is_empty:
                ends.append((pickle.loads(before), path))
        frontier = following
    for world, path in [*ends, *((world, path) for world, _, path in frontier)]:
        try:
            if world.lost:
                world.start_epoch(world.limits, ChunkedPolicy())
            world.drain()
            while world.orphans:
                world.late_result()
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error}\nevents, then drained: {list(path)}")
        happened += world.coverage
        happened["preemptions"] += world.store.counters["num_preemptions"]
    assert happened[case.proves]
    assert len(known) > 100, f"only {len(known)} states explored"
