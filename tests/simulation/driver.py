"""Play a random workload in the world; every choice comes from the seed and the depth."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import takewhile
from random import Random

import msgspec

from services.scheduler.core.loading import LoadTimes
from services.scheduler.core.observer import Observer
from tests.simulation.answer_checks import SimulatedStream
from tests.simulation.policies import build, conserves_work
from tests.simulation.tier import SimulatedTier
from tests.simulation.workload import Arrival, Workload, draw
from tests.simulation.world import World

MOST_ROUNDS = 5_000
"""Maximum of rounds; a run that takes longer is considered endless."""
LAST_CHANGE = MOST_ROUNDS // 2
"""Rounds after which workers are not lost any more, so that long prompts with one token per step can end."""


def play(
    seed: int,
    depth: int,
    trace: Callable[[str], None] | None = None,
    speculates: bool = False,
    observer: Observer | None = None,
    restarts: bool = False,
    adopts: bool = True,
    tier: bool = False,
) -> World:
    """Run the seed's workload at a depth to its end.

    Args:
        restarts: the core is restarted whenever it is empty.
        observer: records the run; without one prefixes are pinned and dropped if the workers have a tier.
        adopts: some workers keep their memory.
        tier: the workers have a tier, loads of which fail or come late.

    Raises: AssertionError, with the name of the broken rule.
    """
    player = _Player(draw(seed, speculates, tier), seed, depth, trace, observer, restarts, adopts)
    for _ in player.rounds():
        pass
    return player.world


def play_peers(seed: int, depth: int, trace: Callable[[str], None] | None = None) -> tuple[World, World]:
    """Run the seed's workload on two engines that fetch blocks from one another. In some runs the first one computes
    only prompts, and the other one gets each request when the first one has begun it, or ended it.

    Raises: AssertionError, with the name of the broken rule.
    """
    load, rng = draw(seed, tier=True), Random(f"peers/{seed}/{depth}")
    longest = load.limits.max_model_len
    arrivals = [
        replace(a, prompt=(a.prompt * longest)[: rng.randint(len(a.prompt), longest - 1)], replayed=0.0)
        for a in load.arrivals
    ]
    load = replace(load, limits=replace(load.limits, fetches_blocks=True), arrivals=arrivals)
    only_prompts = [replace(a, params=msgspec.structs.replace(a.params, max_tokens=1)) for a in load.arrivals]
    has_roles = rng.random() < 0.7
    loads = (replace(load, arrivals=only_prompts) if has_roles else load), load
    first, second = (_Player(each, seed + number, depth, trace) for number, each in enumerate(loads))
    first.peer, second.peer = second, first
    second.follows = has_roles
    runs = {player: player.rounds() for player in (first, second)}
    while runs:
        player = rng.choice([*runs])
        if next(runs[player], None) is None:
            del runs[player]
    return first.world, second.world


class _Player:
    def __init__(
        self,
        load: Workload,
        seed: int,
        depth: int,
        trace: Callable[[str], None] | None = None,
        observer: Observer | None = None,
        restarts: bool = False,
        adopts: bool = True,
    ) -> None:
        self.load, self.seed, self.restarts, self.adopts, self.pins = load, seed, restarts, adopts, observer is None
        of_adapters = Random(f"adapters/{seed}/{depth}")
        self.world = World(
            load.limits,
            depth,
            load.vocab,
            load.use_priority,
            build(load, load.limits, seed),
            trace,
            conserves_work(load),
            speculating=load.speculating,
            seed=seed,
            observer=observer,
            late_masks=load.mask_speed < 1,
            tier=SimulatedTier() if load.limits.loads_blocks else None,
            loads=lambda: of_adapters.random() >= load.failing,
        )
        self.world.coverage[f"policies: {load.policy}"] += 1
        self.world.coverage[f"stages: {load.limits.stages}"] += 1
        self.world.log(load)
        self.arrivals = list(reversed(load.arrivals))
        self.rng = Random(f"{seed}/{depth}")
        parts = ("masks", "memory", "tier", "pins", "ahead", "steps")
        of_parts = (Random(f"{part}/{seed}/{depth}") for part in parts)
        self.of_masks, self.of_memory, self.of_tier, self.of_pins, self.of_ahead, self.of_steps = of_parts
        self.patience = self.of_tier.choice((0.1, 0.5, 0.9))
        self.peer: _Player | None = None
        """Engine that this one fetches blocks from."""
        self.follows = False
        """True: requests come when the peer has begun to compute their prompt, or ended it."""
        self.first_step = self.of_tier.choice((1, 2, 100))
        """Steps of the peer then."""
        self.arrived: list[SimulatedStream] = []

    def rounds(self) -> Iterator[int]:
        """Play rounds. A round is one turn of the service's loop: frontends, then results, then dispatch."""
        world, rng = self.world, self.rng
        for turn in range(MOST_ROUNDS):
            if not self.arrivals and not world.engine.requests and not (world.pending or world.pipeline.busy):
                world.drain()
                while world.orphans:
                    world.late_result()
                world.coverage += Counter() if world.tier is None else world.tier.happened
                return
            self._frontends()
            gated = any(request.stale_rows for request in world.store.waiting)
            if rng.random() < self.load.epochs * (8 if gated else 1) and turn < LAST_CHANGE:
                self._change_workers()
            if world.orphans and rng.random() < 0.3:
                world.late_result()
            self._masks()
            self._tier()
            self._pins()
            self._compute()
            idle = not world.pending or (bool(self.arrivals) and rng.random() < 0.3)
            for _ in range(0 if idle else rng.choice((1, 1, 1, 2, 3))):
                if world.pending:
                    last = len(world.pending) - 1
                    world.complete(rng.randint(0, last) if self.load.shuffle and rng.random() < 0.5 else 0)
            if rng.random() < self.load.noise and (world.pending or world.delivered):
                world.repeat_result(rng.randrange(8), epoch_before=rng.random() < 0.5)
            world.dispatch()
            if self.restarts and world.engine.is_empty:
                world.restart(build(self.load, world.limits, self.seed), self.seed)
            yield turn
        raise AssertionError(f"liveness: not finished after {MOST_ROUNDS} rounds")

    def _masks(self) -> None:
        """Make some masks. Let the worker go on without those that are missing, if it holds others back."""
        world, of_masks = self.world, self.of_masks
        while world.masks.waiting and of_masks.random() < self.load.mask_speed:
            world.masks_made(of_masks.randrange(len(world.masks.waiting)))
        while world.limits.leaves_rows_out and world.worker.holds_back and of_masks.random() < 0.5:
            world.leave_out()

    def _tier(self) -> None:
        """Write blocks to the tier, lose some, and fill blocks of loads; one may take too long."""
        world, rng, tier = self.world, self.of_tier, self.world.tier
        if tier is None or world.lost:
            return
        if self.peer is not None:
            tier.begin_copy = self.peer.world.begin_copy
            world.store.loading.peer_times = LoadTimes()  # loads are always worth it
            if world.pending and rng.random() < 0.5:
                world.executed(rng.randrange(len(world.pending)))
        elif rng.random() < 0.5 and not world.worker.is_behind:
            tier.store(world.names, world.worker.kv)
        if self.peer is None and rng.random() < 0.3:  # another engine shares the tier
            tier.kept.update({name: [*content] for name, content in world.checker.known.items()})
        if tier.kept and rng.random() < 0.1:
            del tier.kept[rng.choice([*tier.kept])]
        for load in [*tier.loads]:
            if load.message.epoch == world.epoch.number:
                for _ in range(rng.choice((0, 1, 1, 2, 4))):
                    tier.fill(load, world.names, world.worker.kv, rng.random() < 0.05)
            if rng.random() < (self.patience if load.is_over else 0.05):
                world.report_load(load)
        if self.peer is not None and self.peer.world.streams and self.of_ahead.random() < 0.2:
            self._load_ahead(self.peer.world)
        if world.store.loading.under_way and rng.random() < 0.02:
            world.log("loads take too long")
            world.engine.advance(world.store.now + 30.0)

    def _load_ahead(self, peer: World) -> None:
        """Load a part of a prompt that the peer computes, or has computed."""
        stream = self.of_ahead.choice(peer.streams[-4:])
        names, known = peer.names_of(stream, self.of_ahead.choice((1, 2, 1000))), peer.checker.known
        names = [*takewhile(known.__contains__, names)]
        self.world.checker.known.update({name: known[name] for name in names})
        self.world.load_ahead(names)

    def _pins(self) -> None:
        """Pin, unpin and drop prefixes of requests that came, if the workers have a tier."""
        world, rng = self.world, self.of_pins
        if world.tier is None or not self.pins or not world.streams or rng.random() > 0.1:
            return
        stream = rng.choice(world.streams[-8:])
        names = world.names_of(stream, rng.choice((1, 2, 3, 1000)))
        pins = [pin.id for pin in world.store.pins]
        action = rng.choice(("pin", "pin", "unpin", "drop"))
        if action == "pin" and names:
            world.pin(rng.choice((f"{stream.number}", *pins[:1])), names)
        elif action == "unpin" and pins:
            world.unpin(rng.choice(pins))
        elif action == "drop" and names and not world.lost:
            world.drop_blocks(names)
        world.coverage["pins: blocks"] += sum(len(pin.table) for pin in world.store.pins)
        world.coverage["pins: of an earlier epoch"] += bool(pins) and world.epoch.number > 1

    def _compute(self) -> None:
        """Let pipeline stages run, all together or each at its own pace."""
        world, rng, stages = self.world, self.rng, self.load.limits.stages
        for _ in range(rng.randint(0, stages + 1) if stages > 1 else 0):
            uneven = self.load.uneven and rng.random() < 0.7
            awake = rng.random()
            world.tick([stage for stage in range(stages) if rng.random() < awake] if uneven else None)
        if world.pipeline.busy and not world.pending and rng.random() < 0.5:
            world.tick()

    def _change_workers(self) -> None:
        """End the epoch; requests come and go until the next one begins, which may end at once."""
        world, rng = self.world, self.rng
        again = True
        while again:
            world.end_epoch()
            for _ in range(rng.choice((0, 0, 1, 2))):
                self._frontends()
                if world.orphans and rng.random() < 0.3:
                    world.late_result()
                if rng.random() < 0.3:
                    world.frontends.receive()
            if rng.random() < 0.2:
                world.end_epoch()
            base = self.load.limits
            num_blocks = rng.choice(
                (base.num_blocks, rng.randint(max(2, base.num_blocks // 3), base.num_blocks * 3 // 2))
            )
            longest = base.max_model_len
            tokens = base.max_num_batched_tokens // 2 // base.block_size * base.block_size
            if tokens and not base.whole_prompts and self.of_steps.random() < 0.3:  # one ran out of memory
                base = replace(base, max_num_batched_tokens=tokens, encoder_budget=-(-base.encoder_budget // 2))
            limits = replace(base, num_blocks=num_blocks)
            if not limits.kv_capacity:  # such workers are refused
                limits = base
            if rng.random() < 0.7:
                longest = min(longest, limits.kv_capacity)
            limits = replace(limits, max_model_len=longest)
            keeps = self._remembers if self.adopts and self.of_memory.random() < 0.8 else None
            world.start_epoch(limits, build(self.load, limits, self.seed), keeps_memory=keeps)
            again = rng.random() < 0.15

    def _remembers(self, block: int) -> bool:
        """Return whether every rank still holds a block; sometimes one does not."""
        return self.of_memory.random() < 0.95

    def _frontends(self) -> None:
        world, rng, load = self.world, self.rng, self.load
        while world.compilation.waiting and rng.random() < 0.4:
            world.compiled(rng.randrange(len(world.compilation.waiting)))
        while self.arrivals and not self._holds_back():
            self._arrive(self.arrivals.pop())
            if rng.random() >= load.burst:
                break
        if rng.random() < load.abort and world.streams:
            victim = rng.choice([s for s in world.streams if s.open] or world.streams)
            if rng.random() < 0.1:
                victim = rng.choice(world.streams)
            world.abort(victim)
            if rng.random() < 0.3:
                world.abort(victim)
            elif rng.random() < 0.5 and victim.aborted:
                self._resubmit(victim)
        gated = [s for s in world.streams if s.open and s.request and s.request.stale_rows]
        if gated and rng.random() < 3 * load.abort:
            world.abort(rng.choice(gated))
        if rng.random() < load.abort / 10:
            world.drop_frontend(rng.randrange(3))
        if rng.random() < load.reset:
            world.reset_prefix_cache(reset_running=rng.random() < 0.7)

    def _holds_back(self) -> bool:
        """Return whether the next request waits: until the core was restarted, as every third one does, or for the peer
        that computes its prompt."""
        if self.follows and self.peer is not None:
            before, number = self.peer.arrived, len(self.arrived)
            return number >= len(before) or (before[number].open and before[number].steps < self.first_step)
        return self.restarts and len(self.arrivals) % 3 == 0 and bool(self.world.engine.requests)

    def _arrive(self, a: Arrival) -> None:
        world = self.world
        stream = SimulatedStream(a.frontend, 0, a.prompt, a.params, a.grammar, a.pooling, a.lora, a.media)
        answer = stream.expected(world.limits.max_model_len, self.load.vocab)
        replayed = max(0, min(int(a.replayed * len(answer.tokens)), len(answer.tokens) - 1))
        world.coverage["replays"] += replayed > 0
        world.coverage["replays with a grammar"] += replayed > 0 and a.grammar is not None
        asks = self.peer is not None and self.of_tier.random() < 0.9
        options = (a.grammar, a.pooling, a.lora, asks, a.media)
        self.arrived.append(world.add(a.prompt, a.params, a.frontend, None, a.priority, a.salt, replayed, *options))

    def _resubmit(self, old: SimulatedStream) -> None:
        """Send another prompt under the same number, at once."""
        if old.key not in self.world.frontends.open:
            prompt = [self.rng.randrange(self.load.vocab) for _ in old.prompt]
            self.world.coverage["numbers reused"] += 1
            self.world.add(prompt, old.params, *old.key, structured=old.structured, pooling=old.pooling, lora=old.lora)
