"""A recorded run replays: its inbound events cause the same decisions in a fresh core, in the same order."""

import os
from collections.abc import Iterable
from contextlib import suppress

import pytest

from services.scheduler.core import observer as events
from services.scheduler.core.drafting import Drafting
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.pins import PinRefused
from services.scheduler.grammar import INLINE_MASKS
from tests.event_recorder import EventRecorder
from tests.simulation.driver import play
from tests.simulation.grammar import Compilation, LateMasks
from tests.simulation.policies import build
from tests.simulation.reference import HIDDEN_SIZE
from tests.simulation.workload import draw

SEEDS = 40 if os.environ.get("RUNAHEAD_SOAK") else 32


def replay(recorded: Iterable[events.Event], seed: int, depth: int, speculates: bool, tier: bool) -> list[events.Event]:
    """Return every event of a fresh core that receives the inbound events of a recorded one."""
    load, recorder = draw(seed, speculates, tier), EventRecorder()
    drafts = load.speculating
    limits = load.limits if drafts is None else drafts.limits(load.limits, depth)
    compilation, masks = Compilation(load.vocab), LateMasks()

    def drafting() -> Drafting | None:
        return None if drafts is None else drafts.drafting(seed)

    engine = EngineCore(
        limits,
        build(load, limits, seed),
        depth,
        load.vocab,
        drafting=drafting(),
        use_priority=load.use_priority,
        compiler=compilation,
        mask_maker=masks if load.mask_speed < 1 else INLINE_MASKS,
        hidden_size=HIDDEN_SIZE,
        observer=recorder,
    )
    for event in recorded:
        if isinstance(event, events.InboundEvent):
            engine.take_outputs()
        match event:
            case events.TimeAdvanced(now=now):
                engine.advance(now)
            case events.RequestArrived(frontend=frontend, message=message):
                engine.add(frontend, message)
            case events.RequestsAborted(frontend=frontend, numbers=numbers):
                engine.abort(frontend, list(numbers))
            case events.FrontendLeft(frontend=frontend):
                engine.drop_frontend(frontend)
            case events.GrammarReady(ticket=ticket):
                engine.on_grammar(ticket, compilation.finish(ticket))
            case events.MasksReady(ticket=ticket):
                engine.on_masks(ticket, masks.finish(ticket))
            case events.ResultArrived(result=result):
                engine.on_result(result)
            case events.DispatchStarted():
                list(engine.dispatch())
            case events.PrefixCacheReset(reset_running=reset_running):
                engine.reset_prefix_cache(reset_running)
            case events.PrefixPinned(pin=pin, owner=owner, names=names):
                with suppress(PinRefused):
                    engine.pin(pin, owner, names)
            case events.PrefixUnpinned(pin=pin):
                engine.unpin(pin)
            case events.BlocksDropped(names=names):
                engine.drop_blocks(names)
            case events.EpochEnded(is_fault=is_fault):
                engine.end_epoch(is_fault)
            case events.EpochStarted(epoch=epoch, limits=limits):
                engine.start_epoch(limits, build(load, limits, seed), epoch)
            case events.BlocksAdopted(held=held):
                engine.adopt(held)
            case events.BlocksFilled(epoch=epoch, ticket=ticket, count=count):
                engine.on_loaded(epoch, ticket, count)
            case events.AllRequestsFailed(error=error):
                engine.fail_all(error)
            case events.CoreRestarted(limits=limits):
                engine.restart(event, build(load, limits, seed), drafting())
    return recorder.events


def comparable(event: events.Event) -> object:
    """Return the event without arrays, so that two can be compared."""
    match event:
        case events.StepDispatched(plan=plan, requests=requests):
            return plan, requests
        case events.ResultApplied(result=result, states=states, counts=counts, ended=ended):
            return result, states.tolist(), counts.tolist(), ended
        case events.GrammarSent(message=message):
            return message.step_id, message.slots, bytes(message.bitmask), message.counts
    return event


@pytest.mark.parametrize("speculates", [False, True], ids=["", "drafts"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_recorded_run_replays_with_the_same_decisions(depth: int, speculates: bool) -> None:
    happened: set[type] = set()
    for seed in range(SEEDS):
        if depth not in draw(seed, speculates).depths:
            continue
        recorder, tier = EventRecorder(), seed % 3 == 0
        play(seed, depth, speculates=speculates, observer=recorder, restarts=seed % 2 == 0, tier=tier)
        again = replay(recorder.events, seed, depth, speculates, tier)
        for index, (first, second) in enumerate(zip(recorder.events, again, strict=True)):
            assert comparable(first) == comparable(second), f"seed {seed}, event {index}"
        happened |= {type(event) for event in again}
    never = {
        events.AllRequestsFailed,
        events.RequestRefused,
        events.DispatchInterrupted,
        events.ResultRefused,
        events.BlocksCached,
        events.BlocksEvicted,
        events.TierChanged,
    }
    assert happened >= {*events.InboundEvent.__args__, *events.Decision.__args__} - never
