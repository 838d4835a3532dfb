"""Many frontends, each with a production placement core, and many simulated engines on a virtual clock.

A session's turns arrive at frontends at random. A frontend gets a report of each engine every
`FleetSetting.report_seconds`, and its KV events every `FleetSetting.event_seconds`. Streams that move begin again on
their target with the tokens that were delivered.
"""

import gc
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.frontend.placement import Condition, EngineReport, Place, Placement
from tests.simulation.placement import cache_aware as cache_aware  # registers the policy
from tests.simulation.placement.engines import Engine
from tests.simulation.placement.workload import SessionRequest

FIRST_TOKEN, END, RETRY = range(3)


class FleetFault(NamedTuple):
    at: float
    kind: str
    """die, stall or partition: the engines are killed, do nothing, or some frontends do not reach them."""
    engines: range
    seconds: float
    frontends: range = range(0)


@dataclass(frozen=True, slots=True)
class FleetSetting:
    policy: str
    engines: int
    frontends: int
    num_blocks: int
    """Blocks in the KV cache of an engine."""
    block_size: int
    max_blocks: int = 2**18
    """Size of the index of a frontend."""
    has_events: bool = True
    report_seconds: int = 2
    event_seconds: int = 6
    faults: tuple[FleetFault, ...] = ()


@dataclass(slots=True)
class OpenStream:
    request: SessionRequest
    frontend: int
    engine: int = -1
    turn: int = 0
    """Number of its placement: events of former ones are void."""
    first: float = -1.0
    """When its first token came."""
    begun: float = 0.0
    step: float = 0.0
    delivered: int = 0
    moves: int = 0

    def deliver(self, now: float) -> None:
        """Count the tokens that came until now; the last one is counted at the end."""
        if self.step and self.begun <= now:
            self.delivered = min(self.delivered + int((now - self.begun) / self.step), self.request.output - 1)


@dataclass(slots=True)
class Result:
    arrived: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    """By end of the request."""
    hit_tokens: int = 0
    prompt_tokens: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    moved: int = 0
    computed: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Prompt tokens computed by each engine."""
    placed: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def p(self, percent: float) -> float:
        """Return a percentile of the seconds until the first token."""
        return float(np.percentile(self.ttft, percent))

    def recovery_seconds(self, at: float, window: float = 10.0) -> float:
        """Return the time after a fault until the 99th percentile is at most 1.2 times that of the 100 s before it, in
        two windows of arrivals in a row."""
        arrived, ttft = np.array(self.arrived), np.array(self.ttft)
        usual = float(np.percentile(ttft[(arrived > at - 100) & (arrived <= at)], 99))
        good = 0
        for number in range(1000):
            begin = at + number * window
            inside = ttft[(arrived > begin) & (arrived <= begin + window)]
            if not len(inside):
                break
            good = good + 1 if np.percentile(inside, 99) <= 1.2 * usual else 0
            if good == 2:
                return (number - 1) * window
        return float("inf")


class FleetWorld:
    def __init__(self, setting: FleetSetting, seed: int) -> None:
        self.setting = setting
        self.engines = [Engine(number, setting.block_size, setting.num_blocks) for number in range(setting.engines)]
        self.frontends = [
            Placement(setting.policy, setting.max_blocks, seed * 1000 + number) for number in range(setting.frontends)
        ]
        self.open: dict[int, OpenStream] = {}
        self.held: dict[int, OpenStream] = {}
        self.result = Result()
        self._rng = np.random.default_rng(seed)
        self._events: list[tuple[float, int, int, int]] = []
        """(time, request, kind, turn): a heap."""
        self._unreachable: dict[int, range] = {}
        """Engines that a frontend does not reach, by its number."""
        self._cut_at: dict[int, float] = {}
        self._faults = sorted(setting.faults)
        self._ends: list[tuple[float, FleetFault]] = []

    def run(self, requests: Iterable[SessionRequest]) -> Result:
        gc.disable()
        second = 0
        self._report_all(0.0)
        for request in requests:
            while second < request.at:
                self._tick(float(second))
                second += 1
            self._advance(request.at)
            self._place(OpenStream(request, int(self._rng.integers(len(self.frontends)))), request.at)
            self.result.prompt_tokens += request.num_tokens
        while self.open or self.held:
            self._tick(float(second))
            second += 1
            self._advance(float(second))
        gc.enable()
        self.result.computed = np.array([engine.computed for engine in self.engines])
        self.result.placed = np.array([engine.placed for engine in self.engines])
        return self.result

    # -- requests ------------------------------------------------------------------------------------------------------

    def _place(self, stream: OpenStream, now: float) -> None:
        request, frontend = stream.request, self.frontends[stream.frontend]
        frontend.advance(now)
        names = {self.setting.block_size: request.names}
        decision = frontend.place_named(request.number, request.num_tokens, names, "")
        if not isinstance(decision, Place):
            self.result.reasons[type(decision).__name__] += 1
            self.held[request.number] = stream
            return
        self.held.pop(request.number, None)
        self.result.reasons[decision.reason] += 1
        self.open[request.number] = stream
        self._send(stream, int(decision.engine.split("-")[1]), now)

    def _send(self, stream: OpenStream, number: int, now: float) -> None:
        engine, request = self.engines[number], stream.request
        stream.engine, stream.turn, stream.step = number, stream.turn + 1, 0.0
        if engine.is_down:
            return  # the frontend will notice, and move it
        first, stream.step, hit = engine.start(request, stream.frontend, stream.delivered, now)
        if stream.turn == 1:
            self.result.hit_tokens += min(hit, request.num_tokens)
        stream.begun = first
        heappush(self._events, (first, request.number, FIRST_TOKEN, stream.turn))
        left = request.output - stream.delivered - 1
        heappush(self._events, (first + left * stream.step, request.number, END, stream.turn))

    def _advance(self, now: float) -> None:
        events = self._events
        while events and events[0][0] <= now:
            at, number, kind, turn = heappop(events)
            stream = self.open.get(number)
            if stream is None or stream.turn != turn:
                continue
            engine = self.engines[stream.engine]
            if engine.is_down:
                continue
            if at < engine.stalled_until:
                heappush(events, (engine.stalled_until, number, kind, turn))
                continue
            if self._is_cut(stream.frontend, stream.engine):
                heappush(events, (at + 1.0, number, kind, turn))
                continue
            if kind == FIRST_TOKEN:
                if stream.first < 0:
                    stream.first = at
            else:
                del self.open[number]
                engine.active.pop(number, None)
                self.frontends[stream.frontend].on_ended(number)
                self.result.arrived.append(stream.request.at)
                self.result.ttft.append(stream.first - stream.request.at)
                self.result.ended["moved" if stream.moves else "stayed"] += 1

    # -- time ----------------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        """Faults begin and end, reports arrive, and streams move."""
        self._advance(now)
        while self._ends and self._ends[0][0] <= now:
            self._end_fault(heappop(self._ends)[1], now)
        while self._faults and self._faults[0].at <= now:
            self._begin_fault(self._faults.pop(0), now)
        self._report_all(now)
        for number, frontend in enumerate(self.frontends):
            frontend.advance(now)
            for move in frontend.moves():
                self._move(move.key, int(move.target.split("-")[1]), now)
                assert self.open[move.key].frontend == number
        for stream in list(self.held.values()):
            self._place(stream, now)

    def _move(self, number: int, target: int, now: float) -> None:
        stream = self.open[number]
        source = self.engines[stream.engine]
        source.active.pop(number, None)
        stream.deliver(now)
        stream.moves += 1
        self.result.moved += 1
        self._send(stream, target, now)

    def _report_all(self, now: float) -> None:
        every, has_events = self.setting.report_seconds, self.setting.has_events
        for engine in self.engines:
            is_changed = engine.is_down or now < engine.stalled_until
            if (engine.number + int(now)) % every and not is_changed and now:
                continue
            name, report = engine.name, engine.report(now)
            stored: list[bytes] = []
            removed: list[bytes] = []
            if has_events and (engine.number + int(now)) % self.setting.event_seconds < every:
                stored, removed, engine.stored, engine.removed = engine.stored, engine.removed, [], []
            for number, frontend in enumerate(self.frontends):
                if self._unreachable and self._is_cut(number, engine.number):
                    lost = now - self._cut_at[number] > 10
                    frontend.on_engine(name, EngineReport(Condition.GONE if lost else Condition.SILENT, "model"))
                    continue
                frontend.on_engine(name, report)
                if stored:
                    frontend.on_blocks_stored(name, stored)
                if removed:
                    frontend.on_blocks_removed(name, removed)

    def _is_cut(self, frontend: int, engine: int) -> bool:
        return frontend in self._unreachable and engine in self._unreachable[frontend]

    def _begin_fault(self, fault: FleetFault, now: float) -> None:
        heappush(self._ends, (now + fault.seconds, fault))
        if fault.kind == "partition":
            for number in fault.frontends:
                self._unreachable[number], self._cut_at[number] = fault.engines, now
            return
        for number in fault.engines:
            engine = self.engines[number]
            if fault.kind == "die":
                for request in engine.active:  # what was delivered until now stays
                    stream = self.open[request]
                    stream.deliver(now)
                    stream.step = 0.0
                engine.fail()
            else:
                engine.stalled_until = now + fault.seconds
                engine.free_at = max(engine.free_at, now) + fault.seconds

    def _end_fault(self, fault: FleetFault, now: float) -> None:
        if fault.kind == "partition":
            for number in fault.frontends:
                del self._unreachable[number]
        elif fault.kind == "die":
            for number in fault.engines:
                self.engines[number].recover(now)
            for stream in list(self.open.values()):  # that did not move: the frontend sends them again
                if stream.engine in fault.engines:
                    self._send(stream, stream.engine, now)
