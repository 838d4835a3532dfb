"""An example of every message. `test_evolution.py` has their bytes, `test_mutations.py` damages them."""

import msgspec
import numpy as np

from protocol.codec import pack
from protocol.handshake import Hello, Refused, Welcome
from protocol.kv_transfer import FetchBlocks, FetchedBlocks
from protocol.membership import (
    Assignment,
    EndEpoch,
    Heartbeat,
    InitializeCache,
    Loaded,
    LoadFailed,
    LoadProgress,
    Ping,
    Pong,
    RankLost,
    Ready,
    Register,
    Shutdown,
)
from protocol.records import CachedBlocks, EngineEvent, EngineEventKind, RankTimes, StepRecord, StepRecords, Subscribe
from protocol.requests import (
    AbortRequest,
    CacheAction,
    CacheControlled,
    ControlCache,
    EnginePhase,
    EngineState,
    Finish,
    FinishReason,
    FrontendAlive,
    GenerateRequest,
    PinnedPrefix,
    RequestOutputs,
)
from protocol.sampling import SamplingParams
from protocol.steps import (
    BlocksLoaded,
    GrammarOutput,
    KeepPins,
    KeptPin,
    LoadBlocks,
    ModelRunnerOutput,
    NewRequest,
    ReleaseSlots,
    SchedulerOutput,
    StepFault,
    StepReport,
    StepTimes,
)

TIMES = StepTimes(1.0, 1.125, 1.25, 1.5, 1.75, 2.0, 0.5)
PARAMS = SamplingParams(64, 0.7, 0.9, 40, 0.05, 2**64 - 1, 2, (2, 5), (300,))

EXAMPLES: list[msgspec.Struct] = [
    Hello(1, 0, "worker", "node-1"),
    Welcome(1, 0),
    Refused("no, thank you"),
    Register("native", "demo", "node-1", 4711),
    Assignment(1, 0, 1, 16, 512, 2048, 4096),
    LoadProgress("reading weights", 0.25),
    Loaded("c0ffee", 32000, 4096, 65536, 1000, True),
    InitializeCache(1000, 4096),
    Ready(1),
    Heartbeat(1, 2**40),
    LoadFailed("no such directory"),
    RankLost(3, "connection closed by peer"),
    EndEpoch(3, "a rank was lost"),
    Ping(12.5),
    Pong(12.5, 100.25, 100.5),
    Shutdown("done"),
    GenerateRequest(2**32 - 1, pack([1, 2, 3]), 2, PARAMS, -5, "tenant", "cmpl-1"),
    AbortRequest([1, 2**32 - 1]),
    FrontendAlive(),
    ControlCache(4294967295, CacheAction.PIN, "system", "0123456789abcdef", bytes(64)),
    CacheControlled(4294967295, "no", [PinnedPrefix("system", "0123456789abcdef", 32, 16, 4096)], 48),
    Subscribe(False),
    CachedBlocks(3, b"n" * 32, b"o" * 32),
    StepRecords(
        [
            StepRecord(
                1,
                17,
                1.0,
                1.25,
                2.0,
                2.25,
                [RankTimes(0, TIMES)],
                pack([0, 0]),
                pack(np.array([7, 9], np.uint32)),
                pack([5, 1]),
                b"\1\0",
                pack([0, 0]),
                pack([0, 1]),
                2,
                2,
                1,
                0.5,
            )
        ],
        [EngineEvent(EngineEventKind.EPOCH_STARTED, 0.5, 1, "two ranks")],
        3,
        2.5,
    ),
    RequestOutputs(
        pack(np.array([7, 9], np.uint32)),
        pack([0, 4]),
        pack([11, 12]),
        [Finish(7, FinishReason.STOP, 300, 16, 1), Finish(9, FinishReason.ERROR, message="the worker failed")],
    ),
    EngineState(EnginePhase.READY, "ready", 1.0, 4096, 32000, 1000, 16, 256, False, {"num_requests_running": 2.0}),
    SchedulerOutput(
        1,
        17,
        pack([4, 0]),
        pack([1, 9]),
        pack([0, 12]),
        pack([5, 1]),
        b"\0\1",
        [NewRequest(4, 1, pack([1, 2, 3, 4, 5, 6]), 6, pack([7]), PARAMS)],
        pack([4, 0]),
        pack([8, 3]),
        pack([2]),
        True,
    ),
    ReleaseSlots(1, pack([3, 4])),
    GrammarOutput(1, 17, pack([0]), pack([-1, 0, 1])),
    LoadBlocks(1, 18, 5, pack([7, 3]), bytes(64), ["tcp://10.0.0.1:5700 key"]),
    BlocksLoaded(1, 5, 2),
    KeepPins(1, 16, [KeptPin("system", "0123", bytes(32))]),
    FetchBlocks(bytes(4), bytes(32)),
    FetchedBlocks(2, memoryview(bytes(6))),
    ModelRunnerOutput(1, 17, pack([4, 0]), pack([1, 9]), pack([2, 0]), pack([11, 12]), TIMES),
    StepReport(1, 17, 3, TIMES),
    StepFault(1, 17, "RuntimeError: out of memory"),
]
