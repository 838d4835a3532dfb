"""Cost of recovery without faults: processor time of the parts that only recovery needs, as a share of all.

A server with a random model answers 16 streams. Its processor time per second and its tokens, steps and requests per
second are measured first. Then the production code of each part runs alone on as many requests:

- signs of life: what each process of the server uses while no request is open. It does hardly anything else then;
- ledger: the frontend keeps each delivered token and checks its index, keeps and submits each request, and looks for
  requests without progress once a second;
- step watch: the scheduler measures each step and compares its time with its limit;
- suspects: the scheduler asks for a request that must run alone, and removes what it knows about a request that ends;
- checks of a turn: in each turn of its loop the scheduler checks the time limits of workers, the leases of
  frontends, and whether another scheduler has taken its place.

These are upper bounds: an idle process has other timers too, and without a ledger a frontend would also look up each
token's stream.
"""

import argparse
import time
from collections.abc import Callable
from itertools import count

import numpy as np

from protocol.codec import pack
from protocol.membership import Loaded, Ready, Register
from protocol.requests import Finish, GenerateRequest
from protocol.sampling import SamplingParams
from protocol.steps import SchedulerOutput
from services.config import SchedulerConfig
from services.frontend.engine.ledger import RequestLedger
from services.frontend.engine.streams import FlushQueue, RawLogprobs, RequestStream, ResponseStream
from services.scheduler.leadership import Leadership
from services.scheduler.membership import StepSize, WorkerGroup
from tests.benchmarks.scheduler_cost import build
from tests.benchmarks.support.processor_time import seconds_by_process
from tests.benchmarks.support.random_llama import random_llama
from tests.benchmarks.support.report import add_ints, report
from tests.benchmarks.support.servers import ServerProcess, runahead_process, served

TURNS = 2
"""Turns of the scheduler's loop per step: one for its result, one for messages of frontends."""
REPEATS = 2000


def used(server: ServerProcess, work: Callable[[], float]) -> dict[str, float]:
    """Return the processor time of each process per second of `work`, which returns its seconds."""
    before = seconds_by_process(server)
    seconds = work()
    return {name: (total - before[name]) / seconds for name, total in seconds_by_process(server).items()}


def microseconds(call: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
    """Return the mean processor time of a call, without that of the clock. `prepare` runs before each call."""
    return _mean(call, prepare) - _mean(lambda: None, prepare)


def _mean(call: Callable[[], object], prepare: Callable[[], object]) -> float:
    total = 0
    for _ in range(REPEATS):
        prepare()
        began = time.thread_time_ns()
        call()
        total += time.thread_time_ns() - began
    return total / REPEATS / 1000


class UnreadStream(RequestStream):
    """A stream whose outputs are not read: only what the ledger does is measured."""

    def feed(self, tokens: list[int], end: Finish | None, now: float) -> bytes:
        return b""

    def add_logprobs(self, logprobs: RawLogprobs) -> None: ...

    def add_embedding(self, values: bytes) -> None: ...


class LedgerLoad:
    """The ledger of a frontend with open requests."""

    def __init__(self, streams: int, input_len: int, output_len: int) -> None:
        self.ledger, self._numbers, self._length = RequestLedger(), count(1), output_len
        self._prompt = pack(np.arange(input_len, dtype=np.int32))
        self._params = SamplingParams(max_tokens=output_len)
        for _ in range(streams):
            self._open()
        self._step: tuple[list[int], list[int], list[int]] = [], [], []

    def _open(self) -> int:
        stream, number = UnreadStream(ResponseStream(FlushQueue())), next(self._numbers)
        stream.is_due = True  # the next flush has it already
        params = self._params
        request = GenerateRequest(number, self._prompt, len(self._prompt) // 4, params)
        now = time.monotonic()
        self.ledger.assign(self.ledger.open(stream, request, now), "0")
        self.ledger.submissions(("0", 1), "", now)
        return number

    def request(self) -> None:
        """Open, submit and close a request."""
        self.ledger.close(self._open())

    def prepare_step(self) -> None:
        streams = self.ledger.streams["0"]
        for stream in streams.values():
            stream.tokens.clear()
            if len(stream.output) == self._length:
                stream.output.clear()
        indices = [len(stream.output) for stream in streams.values()]
        self._step = list(streams), indices, [5] * len(indices)

    def deliver(self) -> None:
        self.ledger.deliver("0", *self._step)

    def find_stuck(self) -> None:
        self.ledger.stuck(time.monotonic(), 60.0)


class SchedulerLoad:
    """The parts of a scheduler with one worker whose epoch is in effect."""

    def __init__(self, streams: int) -> None:
        now, config = time.monotonic(), SchedulerConfig()
        self._group = WorkerGroup(config)
        self._group.on_message(b"w", Register("native", "m"), now)
        epoch = self._group.epoch
        self._group.on_message(b"w", Loaded("", 1000, 512, 64, 4096, epoch=epoch), now)
        self._group.on_message(b"w", Ready(epoch), now)
        list(self._group.take_actions())
        assert self._group.status.phase.name == "READY"
        self._leadership = Leadership(60.0, now)
        self._planner, _ = build(streams)
        self._planner.schedule()
        planned = self._planner.schedule()
        self._plan: SchedulerOutput = planned[1]
        self._step_ids = count(1)

    def watch_step(self) -> None:
        step_id, group = next(self._step_ids), self._group
        group.on_dispatch(step_id, time.monotonic(), StepSize.from_plan(self._plan))
        group.may_return(b"w", group.epoch)
        group.on_result(group.epoch, step_id, time.monotonic())

    def turn(self) -> None:
        now = time.monotonic()
        self._leadership.lost(now, replaced=False)
        self._group.check(now)
        list(self._group.take_actions())

    def find_suspect(self) -> None:
        self._planner.suspect()

    def end_request(self) -> None:
        self._planner.store.suspects.forget((0, 1))


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="m4", help="a random model, as in engine_efficiency")
    add_ints(parser, streams=16, input_len=128, output_len=128, waves=8, idle_seconds=20)
    args = parser.parse_args()
    load: dict[str, float] = {}

    def serve() -> float:
        load.update(served(server.url, args.streams, args.input_len, args.output_len, args.waves, warmups=0))
        return load["duration"]

    def rest() -> float:
        began = time.monotonic()
        time.sleep(args.idle_seconds)
        return time.monotonic() - began

    with runahead_process(random_llama(args.model), "--threads=2", "--dtype=float32") as server:
        served(server.url, 2, args.input_len, args.output_len, waves=1, warmups=0)
        busy = used(server, serve)
        idle = used(server, rest)

    tokens = load["output_throughput"]
    steps, requests, total = tokens / args.streams, tokens / args.output_len, sum(busy.values())
    frontend, scheduler = (LedgerLoad(args.streams, args.input_len, args.output_len), SchedulerLoad(args.streams))
    parts = [
        *((f"signs of life: {name}", 1e6 * seconds, 1.0) for name, seconds in idle.items()),
        ("ledger: tokens of a step", microseconds(frontend.deliver, frontend.prepare_step), steps),
        ("ledger: a request", microseconds(frontend.request), requests),
        ("ledger: requests without progress", microseconds(frontend.find_stuck), 1.0),
        ("step watch: a step", microseconds(scheduler.watch_step), steps),
        ("suspects: a step", microseconds(scheduler.find_suspect), steps),
        ("suspects: a request", microseconds(scheduler.end_request), requests),
        ("checks of a turn", microseconds(scheduler.turn), TURNS * steps),
    ]  # fmt: skip
    rows = [
        {
            "part": part,
            "us": us,
            "per s": rate,
            "us/token": us * rate / tokens,
            "share": f"{us * rate / 1e6 / total:.3%}",
        }
        for part, us, rate in parts
    ]
    recovery = sum(us * rate / 1e6 for _, us, rate in parts)
    report(
        "recovery_cost",
        title=f"{args.model}, {args.streams} streams: processor time of what only recovery needs",
        rows=rows,
        figures={
            "share of the processor time of all services": f"{recovery / total:.2%}",
            "processor time, us/token": 1e6 * total / tokens,
            "of that for recovery, us/token": 1e6 * recovery / tokens,
            "tokens/s": tokens,
            "cores": busy,
        },
        settings=vars(args),
        repeats=[busy, idle],
    )
