"""One filled-in example of every message. `test_evolution.py` has their bytes, `test_mutations.py` damages them."""

import msgspec
import numpy as np

from protocol.codec import pack
from protocol.handshake import Hello, Refused, Welcome
from protocol.membership import (
    Assignment,
    EndEpoch,
    Heartbeat,
    InitializeCache,
    Loaded,
    LoadFailed,
    LoadProgress,
    Ping,
    RankLost,
    Ready,
    Register,
    Shutdown,
)
from protocol.requests import (
    AbortRequest,
    EnginePhase,
    EngineState,
    Finish,
    FinishReason,
    GenerateRequest,
    RequestOutputs,
)
from protocol.sampling import SamplingParams
from protocol.steps import (
    GrammarOutput,
    ModelRunnerOutput,
    NewRequest,
    ReleaseSlots,
    SchedulerOutput,
    StepFault,
)

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
    Ping(),
    Shutdown("done"),
    GenerateRequest(2**32 - 1, pack([1, 2, 3]), 2, PARAMS, -5, "tenant", "cmpl-1"),
    AbortRequest([1, 2**32 - 1]),
    RequestOutputs(
        pack(np.array([7, 9], np.uint32)),
        pack([0, 4]),
        pack([11, 12]),
        [
            Finish(7, FinishReason.STOP, 300, 16, 1),
            Finish(9, FinishReason.ERROR, message="the worker failed"),
        ],
    ),
    EngineState(
        EnginePhase.READY, "ready", 1.0, 4096, 32000, 1000, 16, 256, False, {"num_requests_running": 2.0}
    ),
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
    ModelRunnerOutput(1, 17, pack([4, 0]), pack([1, 9]), pack([2, 0]), pack([11, 12]), 1.5, 2.5, 0.125),
    StepFault(1, 17, "RuntimeError: out of memory"),
]
