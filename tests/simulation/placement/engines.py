"""SIMULATED engines: prompts are computed one after the other, in the order of arrival, in steps that take as long as
the cost model of `runahead replay` says; outputs are decoded beside them. The prefix cache is an LRU of whole blocks.

Simplifications: the rows of a prompt's steps are those that decode when it arrives, a request decodes at the pace of
the step in which it begins, and memory never runs short.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from services.frontend.placement import Condition, EngineReport
from services.scheduler.what_if.cost import StepCost
from tests.simulation.placement.workload import SessionRequest

COST = StepCost(np.array((10e-3, 50e-6, 100e-6, 0.8e-9, 0.0, 0.0)), 0.0, 0, np.ones(6, np.bool_))
"""An assumed device: 20,000 prompt tokens/s, 10 ms a step, 0.1 ms a decoding row, 0.8 ns a pair of tokens."""
STEP, PREFILL, DECODE, CONTEXT = COST.seconds[:4].tolist()
CHUNK = 2048


@dataclass(slots=True)
class Engine:
    number: int
    block_size: int
    num_blocks: int
    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    stored: list[bytes] = field(default_factory=list)
    """Events since the last report."""
    removed: list[bytes] = field(default_factory=list)
    active: dict[int, int] = field(default_factory=dict)
    """Frontend of each open request."""
    free_at: float = 0.0
    """When the prompts that have arrived are computed."""
    stalled_until: float = 0.0
    is_down: bool = False
    computed: int = 0
    """Prompt tokens."""
    placed: int = 0

    @property
    def name(self) -> str:
        return f"engine-{self.number}"

    def start(self, request: SessionRequest, frontend: int, delivered: int, now: float) -> tuple[float, float, int]:
        """Return when its next token comes, the seconds of a token after that, and the hit tokens."""
        cache, hit = self.cache, 0
        for name in request.names:
            if name not in cache:
                break
            cache.move_to_end(name)
            hit += 1
        for name in request.names[hit:]:
            if name not in cache:
                self.stored.append(name)
            cache[name] = None
        while len(cache) > self.num_blocks:
            self.removed.append(cache.popitem(last=False)[0])
        total = request.num_tokens + delivered
        tokens = max(1, total - hit * self.block_size)
        rows = len(self.active)
        self.active[request.number] = frontend
        steps = -(-tokens // CHUNK)
        seconds = steps * (STEP + rows * DECODE) + tokens * PREFILL + tokens * (total - tokens / 2) * CONTEXT
        first = max(now, self.free_at, self.stalled_until) + seconds
        self.free_at = first
        self.computed += tokens
        self.placed += 1
        return first, self.step(rows + 1, total), hit * self.block_size

    def step(self, rows: int, context: int) -> float:
        return STEP + rows * (DECODE + context * CONTEXT)

    def report(self, now: float) -> EngineReport:
        silent = now < self.stalled_until
        return EngineReport(
            Condition.GONE if self.is_down else Condition.SILENT if silent else Condition.READY,
            "model",
            max(0.0, self.free_at - now),
            self.block_size,
            PREFILL + STEP / CHUNK,
            len(self.active),
            self.step(max(1, len(self.active)), 12_000),
        )

    def fail(self) -> None:
        self.cache.clear()
        self.stored, self.removed = [], []
        self.active.clear()
        self.is_down = True

    def recover(self, now: float) -> None:
        self.is_down, self.free_at = False, now
