"""Cost of the scheduler per step: forming a step and applying its result, every request decoding, no model.

Prompts have different lengths, so that block boundaries are spread evenly over the steps. Prefix caching is on and two
steps are in flight. Prints the mean time per step in microseconds, and the time of a whole turn of the core without and
with a recorder of step records; the time with it includes making the records.
With `recording` it prints the cost of `--record`: a core that is not recorded and two that are take turns, with a pause
of 2 ms behind each, in which workers would compute.
"""

import argparse
import gc
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocol.codec import pack, unpack
from protocol.records import RankTimes
from protocol.requests import GenerateRequest
from protocol.sampling import SamplingParams
from protocol.steps import ModelRunnerOutput, SchedulerOutput, StepTimes
from services.scheduler.core.apply import ResultApplier
from services.scheduler.core.drafting import NO_DRAFTING
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.epoch import EpochState
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import Observer
from services.scheduler.core.plan import StepPlanner
from services.scheduler.core.request import Request
from services.scheduler.core.store import RequestStore
from services.scheduler.policies import ChunkedPolicy
from services.scheduler.recording import FlightRecorder, RecordingHeader, SegmentWriter
from services.scheduler.recording.records import VERSION
from services.scheduler.step_records import StepRecorder
from tests.benchmarks.support.report import report
from tests.simulation.results import one_token_each

PROMPT, OUTPUT, STEPS, REPEATS = 128, 1500, 480, 3
VOCAB = 4096
BLOCK_SIZE = 16
BATCH_STEPS = 10
"""Steps between two batches of step records."""


def limits_of(running: int) -> Limits:
    return Limits(
        max_num_seqs=running,
        max_num_batched_tokens=max(8192, running * (PROMPT + BLOCK_SIZE) + 1),
        max_model_len=2048,
        num_blocks=running * (1024 // BLOCK_SIZE + 2) + 64,
        block_size=BLOCK_SIZE,
    )


def prompt(number: int) -> NDArray[np.int32]:
    return ((number * 7919 + np.arange(PROMPT + number % BLOCK_SIZE) * 31) % 3700 + 300).astype(np.int32)


PARAMS = SamplingParams(max_tokens=OUTPUT, temperature=0.0)


def build(running: int) -> tuple[StepPlanner, ResultApplier]:
    store = RequestStore()
    epoch = EpochState(1, limits_of(running), ChunkedPolicy(), store)
    lifecycle = Lifecycle(store, epoch)
    for number in range(running):
        tokens = prompt(number)
        store.waiting.add(Request(0, number, tokens, len(tokens), PARAMS, number))
    return StepPlanner(store, epoch, lifecycle, NO_DRAFTING), ResultApplier(store, epoch, lifecycle, NO_DRAFTING)


def run(running: int) -> float:
    """Return the mean time of a step, microseconds."""
    planner, applier = build(running)
    queue, seconds = [planner.schedule(), planner.schedule()], []
    token_ids = (np.arange(running) * 13 % 3700 + 300).astype(np.int32)
    gc.collect()
    gc.freeze()
    for index in range(STEPS + 20):
        step, *_ = queue.pop(0)  # type: ignore[misc]
        assert len(step.slots) == running
        started = time.perf_counter()
        applier.apply(step, one_token_each(unpack(pack(token_ids))))
        applier.store.take_outputs()
        queue.append(planner.schedule())
        if index >= 20:
            seconds.append(time.perf_counter() - started)
    gc.unfreeze()
    return 1e6 * statistics.mean(seconds)


class RecordedTurns:
    """Turns of an `EngineCore`: apply the result of the oldest step and dispatch the next one."""

    def __init__(self, running: int, recorder: StepRecorder | None = None, observer: Observer | None = None) -> None:
        self._core = EngineCore(limits_of(running), ChunkedPolicy(), 2, VOCAB)
        if observer is not None:
            self._core.observers.add(observer)
        self._recorder = recorder
        self._count = 0
        self.seconds: list[float] = []
        for number in range(running):
            tokens = prompt(number)
            self._core.add(0, GenerateRequest(number, pack(tokens), len(tokens), PARAMS))
        if recorder is not None:
            self._core.observers.add(recorder)
        self._plans = [plan for plan in self._core.dispatch() if isinstance(plan, SchedulerOutput)]

    def turn(self) -> None:
        plan = self._plans.pop(0)
        rows = len(unpack(plan.slots))
        ones, ids = pack(np.ones(rows, np.int32)), pack(np.full(rows, 301, np.int32))
        result = ModelRunnerOutput(
            plan.epoch, plan.step_id, plan.slots, plan.generations, ones, ids, StepTimes(*[1.0] * 7)
        )
        started = time.perf_counter()
        self._core.advance(started)
        if self._recorder is not None:
            self._recorder.add_times(plan.epoch, plan.step_id, RankTimes(0, result.times, True), clock_offset=0.0)
        self._core.on_result(result)
        self._plans += [plan for plan in self._core.dispatch() if isinstance(plan, SchedulerOutput)]
        self._core.take_outputs()
        self._count += 1
        if self._recorder is not None and not self._count % BATCH_STEPS:
            self._recorder.take()
        self.seconds.append(time.perf_counter() - started)


def listening(running: int) -> dict[str, float]:
    """Return the mean time of a turn without and with a recorder, microseconds; the two take turns."""
    silent, recorded = RecordedTurns(running), RecordedTurns(running, StepRecorder(1, 1))
    gc.collect()
    gc.freeze()
    for _ in range(STEPS + 20):
        silent.turn()
        recorded.turn()
    gc.unfreeze()
    return {
        "turn_us": 1e6 * statistics.mean(silent.seconds[20:]),
        "recorded_turn_us": 1e6 * statistics.mean(recorded.seconds[20:]),
    }


PAUSE = 0.002
"""Seconds between two turns of the cores that are recorded."""


def flight_recorder(directory: Path, running: int, has_tokens: bool) -> FlightRecorder:
    def header(segment: int) -> RecordingHeader:
        limits = limits_of(running)
        return RecordingHeader(VERSION, 1, segment, has_tokens, "{}", limits, 1, VOCAB, 0, False, "benchmark")

    directory.mkdir()
    return FlightRecorder(header(0), SegmentWriter(directory, header, 1 << 30))


def thread_clock(thread: threading.Thread) -> Callable[[], float]:
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    return lambda: time.clock_gettime(clock)


def flight_recording(running: int) -> dict[str, float]:
    """Return the median time of a turn without a recorder and with one, in the scheduling loop, and the processor time
    of the recorder's thread per step, microseconds; bytes of the recording per step."""
    names = {"lengths": False, "tokens": True}
    with tempfile.TemporaryDirectory() as directory:
        known, recorders, clocks = set(threading.enumerate()), {}, {}
        for name, has_tokens in names.items():
            recorders[name] = flight_recorder(Path(directory) / name, running, has_tokens)
            (thread,) = set(threading.enumerate()) - known
            known.add(thread)
            clocks[name] = thread_clock(thread)
        silent = RecordedTurns(running)
        recorded = {name: RecordedTurns(running, observer=recorders[name]) for name in names}
        turns = [silent, *recorded.values()]
        before: dict[str, float] = {}
        gc.collect()
        gc.freeze()
        for index in range(STEPS + 20):
            if index == 20:
                before = {name: clock() for name, clock in clocks.items()}
            for each in turns[index % 3 :] + turns[: index % 3]:
                each.turn()
                time.sleep(PAUSE)
        gc.unfreeze()
        time.sleep(0.5)
        spent = {name: clock() - before[name] for name, clock in clocks.items()}
        for recorder in recorders.values():
            recorder.close()
        sizes = {name: sum(file.stat().st_size for file in (Path(directory) / name).iterdir()) for name in names}
    us = 1e6
    return {
        "turn_us": us * statistics.median(silent.seconds[20:]),
        **{f"turn_{name}_us": us * statistics.median(recorded[name].seconds[20:]) for name in names},
        **{f"thread_{name}_us": us * spent[name] / STEPS for name in names},
        **{f"bytes_{name}": sizes[name] / STEPS for name in names},
    }


def recording_main() -> None:
    repeats = {str(n): [flight_recording(n) for _ in range(REPEATS)] for n in (16, 256)}
    best = {n: min(rows, key=lambda row: row["turn_us"]) for n, rows in repeats.items()}
    report(
        "scheduler_cost_recording",
        title="a turn of the core with --record, all requests decoding",
        rows=[{"running": n, **row} for n, row in best.items()],
        figures={
            f"{name}_over_silent": {
                n: statistics.median(row[f"turn_{name}_us"] / row["turn_us"] for row in rows)
                for n, rows in repeats.items()
            }
            for name in ("lengths", "tokens")
        },
        settings={"prompt": PROMPT, "steps": STEPS, "pause_s": PAUSE, "in_flight": 2},
        repeats=repeats,
    )


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", nargs="?", choices=["recording"], help="the cost of --record instead")
    if parser.parse_args().part:
        recording_main()
        return
    repeats = {
        str(running): [{"step_us": run(running), **listening(running)} for _ in range(REPEATS)]
        for running in (64, 256, 1024)
    }
    best = {running: min(rows, key=lambda row: row["step_us"]) for running, rows in repeats.items()}
    report(
        "scheduler_cost",
        title="forming a step + applying its result, all requests decoding",
        rows=[{"running": running, **row} for running, row in best.items()],
        figures={
            "step_us": {running: row["step_us"] for running, row in best.items()},
            "recorded_over_silent": {
                running: statistics.median(row["recorded_turn_us"] / row["turn_us"] for row in rows)
                for running, rows in repeats.items()
            },
        },
        settings={"prompt": PROMPT, "steps": STEPS, "block_size": BLOCK_SIZE, "in_flight": 2, "prefix_caching": True},
        repeats=repeats,
    )
