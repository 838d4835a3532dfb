"""Recordings of simulated runs: with and without tokens they replay with the same plans, and a fault is found."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from services.scheduler.build import CoreStart
from services.scheduler.core.drafting import NO_DRAFTING, Drafting
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import (
    AllRequestsFailed,
    BlocksFilled,
    CoreRestarted,
    Decision,
    DispatchInterrupted,
    InboundEvent,
    LoadSent,
    RequestFinished,
    RequestRefused,
    ResultRefused,
)
from services.scheduler.core.slots import SlotIds
from services.scheduler.policies import BatchingPolicy, ChunkedPolicy, SchedulerView
from services.scheduler.recording import (
    EventRecording,
    FlightRecorder,
    RecordingError,
    RecordingHeader,
    Replay,
    SegmentWriter,
    describe,
)
from services.scheduler.recording.records import VERSION, ArrivalRecord, PlanRecord
from tests.matrix import covering
from tests.simulation.driver import play
from tests.simulation.policies import build
from tests.simulation.reference import HIDDEN_SIZE
from tests.simulation.workload import Workload, draw

INCARNATION = 1_700_000_000_000


def has_tier(seed: int) -> bool:
    return seed % 3 == 0


@dataclass(frozen=True)
class SimulatedCore:
    """A `CoreFactory` for the core of a simulated run."""

    seed: int
    depth: int
    load: Workload
    limits: Limits

    @classmethod
    def drawn(cls, seed: int, depth: int, speculates: bool) -> "SimulatedCore":
        load = draw(seed, speculates, has_tier(seed))
        limits = load.limits if load.speculating is None else load.speculating.limits(load.limits, depth)
        return cls(seed, depth, load, limits)

    def header(self, segment: int, has_tokens: bool) -> RecordingHeader:
        return RecordingHeader(
            *(VERSION, INCARNATION, segment, has_tokens, "{}", self.limits, 1, self.load.vocab, HIDDEN_SIZE),
            *(True, "test"),
            late_masks=self.load.mask_speed < 1,
        )

    def policy(self, limits: Limits) -> BatchingPolicy:
        return build(self.load, limits, self.seed)

    def drafting(self) -> Drafting:
        return NO_DRAFTING if self.load.speculating is None else self.load.speculating.drafting(self.seed)

    def core(self, start: CoreStart) -> EngineCore:
        return EngineCore(
            self.limits,
            self.policy(self.limits),
            self.depth,
            self.load.vocab,
            drafting=self.drafting(),
            use_priority=self.load.use_priority,
            compiler=start.compiler,
            mask_maker=start.mask_maker,
            hidden_size=HIDDEN_SIZE,
        )


def record(
    directory: Path, seed: int, depth: int, speculates: bool, has_tokens: bool, restarts: bool = False
) -> SimulatedCore:
    """Record a run of the simulator. `restarts`: the core is restarted whenever it is empty."""
    made = SimulatedCore.drawn(seed, depth, speculates)

    def header(segment: int) -> RecordingHeader:
        return made.header(segment, has_tokens)

    recorder = FlightRecorder(header(0), SegmentWriter(directory, header, 1 << 30))
    try:
        play(
            *(seed, depth),
            speculates=speculates,
            observer=recorder,
            restarts=restarts,
            adopts=has_tokens,
            tier=has_tier(seed),
        )
    finally:
        recorder.close()
    return made


@pytest.mark.parametrize(("depth", "speculates", "has_tokens"), covering([1, 2, 3], [False, True], [False, True]))
def test_a_recording_replays_with_the_same_decisions(
    tmp_path: Path, depth: int, speculates: bool, has_tokens: bool
) -> None:
    num_plans, happened = 0, set[type]()
    for seed in range(8):
        load = draw(seed, speculates)
        if depth not in load.depths:
            continue
        directory = tmp_path / str(seed)
        directory.mkdir()
        made = record(directory, seed, depth, speculates, has_tokens)
        recording = EventRecording(directory)
        run = Replay(recording, made)
        difference = run.run()
        assert difference is None, f"seed {seed}: {describe(difference)}"
        num_plans += run.num_plans
        happened |= {type(entry) for entry in recording.records()}
        assert not recording.torn
    assert num_plans > 100
    assert happened >= {PlanRecord, RequestFinished, LoadSent, BlocksFilled}


@pytest.mark.parametrize(("speculates", "has_tokens"), covering([False, True], [False, True], strength=1))
def test_a_recording_without_its_beginning_replays_from_each_restart(
    tmp_path: Path, speculates: bool, has_tokens: bool
) -> None:
    num_restarts = num_plans = late_masks = 0
    happened: set[type] = set()
    for seed in range(16):
        load = draw(seed, speculates)
        if 2 not in load.depths:
            continue
        directory = tmp_path / str(seed)
        directory.mkdir()
        made = record(directory, seed, 2, speculates, has_tokens, restarts=True)
        happened |= {type(entry) for entry in EventRecording(directory).records()}
        files = sorted(directory.iterdir())
        for number, file in enumerate(files):
            recording = EventRecording(directory)
            run = Replay(recording, made)
            difference = run.run()
            assert difference is None, f"seed {seed}, segment {number}: {describe(difference)}"
            num_plans += run.num_plans if number else 0
            if number and load.mask_speed < 1:
                restart = next(recording.records_from_start())
                assert isinstance(restart, CoreRestarted)
                late_masks += restart.mask_tickets
            file.unlink()
        num_restarts += len(files) - 1
    assert num_restarts > 10
    assert num_plans > 100
    assert late_masks > 10
    never = {ArrivalRecord, AllRequestsFailed, RequestRefused, DispatchInterrupted, ResultRefused}
    if has_tokens:
        assert happened >= {*InboundEvent.__subclasses__(), *Decision.__subclasses__()} - never


class OtherPolicy(ChunkedPolicy):
    """A planted change: from some step on the running requests are in reverse order."""

    FROM_STEP = 6

    def order(self, view: SchedulerView) -> SlotIds:
        slots = super().order(view)
        return slots[::-1] if view.next_step >= self.FROM_STEP else slots


class ChangedCore(SimulatedCore):
    def policy(self, limits: Limits) -> BatchingPolicy:
        return OtherPolicy(self.load.threshold)


@pytest.mark.parametrize("has_tokens", [False, True], ids=["lengths", "tokens"])
def test_a_changed_policy_is_found_at_its_step(tmp_path: Path, has_tokens: bool) -> None:
    found = 0
    for seed in range(80):
        load = draw(seed)
        if load.policy != "chunked" or load.limits.stages > 1 or load.vocab < 64 or load.epochs:
            continue
        directory = tmp_path / str(seed)
        directory.mkdir()
        made = record(directory, seed, 2, False, has_tokens)
        changed = ChangedCore(made.seed, made.depth, made.load, made.limits)
        difference = Replay(EventRecording(directory), changed).run()
        if difference is None:  # never two running requests after the change
            continue
        assert isinstance(difference.recorded, PlanRecord)
        assert isinstance(difference.replayed, PlanRecord)
        assert difference.recorded.plan.step_id == difference.replayed.plan.step_id >= OtherPolicy.FROM_STEP
        text = describe(difference)
        assert "! plan.slots" in text
        assert str(np.frombuffer(difference.recorded.plan.slots, np.int32).tolist()) in text
        assert str(np.frombuffer(difference.replayed.plan.slots, np.int32).tolist()) in text
        found += 1
    assert found > 3


def test_a_damaged_segment_before_the_last_one_is_refused(tmp_path: Path) -> None:
    record(tmp_path, 3, 2, False, has_tokens=True)
    [file] = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    (tmp_path / file.name.replace("-000000", "-000001")).write_bytes(data)
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(RecordingError, match="damaged"):
        [*EventRecording(tmp_path).records()]
