"""Cost of the step records and of a page that shows them, in the frontend: the streams of `frontend_streaming`, without
records, and with records of every step, a ring and a viewer that follows it as the page does.

Both frontends run at the same time and take turns, so that both meet the same machine; `with_over_without` is the ratio
of the least CPU times per token. A step of 256 rows and two ranks is recorded for every 15 ms.

On a busy machine late steps are joined into one write, which makes tokens cheaper by chance. `share` does not depend on
it: the CPU time of records and viewer alone, ten times as fast, over that of the tokens of a step without them.
"""

import argparse
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import numpy as np
import psutil

from protocol.codec import encode, pack
from protocol.epochs import first_epoch
from protocol.records import RankTimes, StepRecord, StepRecords
from protocol.silence import SIGN_INTERVAL
from protocol.steps import StepTimes
from services.scheduler.subscriptions import BATCH_SECONDS
from tests.benchmarks.frontend_streaming import StreamingCase, UniformEngine, client_process, cpu, frontend, round_of
from tests.benchmarks.support.report import add_ints, report

INCARNATION = 1_763_900_000_123
STEP_SECONDS = 0.015
SPEED = 10
RECORDS = 4000


class RecordingEngine(UniformEngine):
    """Sends step records beside the tokens."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint, INCARNATION)
        self._records: list[StepRecord] = []
        self._sent = self._signed = 0.0

    def send(self, frame: bytes) -> None:
        super().send(frame)
        self._add_record(BATCH_SECONDS)

    def send_records(self, count: int, pace: float, batch_seconds: float) -> None:
        """Send so many records without tokens. `pace`: seconds between two of them."""
        due = time.perf_counter()
        for _ in range(count):
            due += pace
            time.sleep(max(0.0, due - time.perf_counter()))
            self._add_record(batch_seconds)

    def _add_record(self, batch_seconds: float) -> None:
        self._records.append(self._record())
        now = time.monotonic()
        if now - self._signed >= SIGN_INTERVAL:
            self._signed = now
            self.send_state()
        if now - self._sent >= batch_seconds:
            self._sent = now
            super().send(encode(StepRecords(self._records, [], 0, now)))
            self._records = []

    def _record(self) -> StepRecord:
        rows, now = len(self._numbers), time.monotonic()
        zeros, ones = pack([0] * rows), pack([1] * rows)
        times = StepTimes(*(now + i * 1e-3 for i in range(6)))
        return StepRecord(
            first_epoch(INCARNATION) + 1, int(now * 1000), now, now, now, now,
            [RankTimes(rank, times, rank == 0) for rank in range(2)],
            zeros, pack(np.asarray(self._numbers, np.uint32)), ones, b"\0" * rows, zeros, ones, 2, rows, 0, 0.5,
        )  # fmt: skip


@contextmanager
def viewer(url: str) -> Iterator[None]:
    """Follow the steps as the page does."""
    stop = threading.Event()

    def follow() -> None:
        with httpx.stream("GET", f"{url}/debug/steps/stream", timeout=None) as events:
            for _ in events.iter_raw():
                if stop.is_set():
                    return

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def alone_us(server: tuple[psutil.Process, str, UniformEngine]) -> float:
    """Return the CPU time of the frontend for a record, its way to a viewer included, microseconds."""
    process, url, engine = server
    assert isinstance(engine, RecordingEngine)
    began = cpu(process)
    with viewer(url):
        engine.send_records(RECORDS, STEP_SECONDS / SPEED, BATCH_SECONDS / SPEED)
    return 1e6 * (cpu(process) - began) / RECORDS


def main(parser: argparse.ArgumentParser) -> None:
    add_ints(parser, streams=256, tokens=128, repeats=6)
    arguments = parser.parse_args()
    case = StreamingCase("1 a connection, step 15 ms", arguments.streams, arguments.tokens, STEP_SECONDS)
    warm_up = StreamingCase("warm-up", 32, 32, 0.0)
    found: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    with ExitStack() as stack:
        clients = stack.enter_context(client_process())
        plain = stack.enter_context(frontend(""))
        recorded = stack.enter_context(frontend("", make_engine=RecordingEngine, step_ring=1024))
        for server in (plain, recorded):
            round_of(warm_up, *server, clients)
        for _ in range(arguments.repeats):
            found["without"].append(round_of(case, *plain, clients))
            with viewer(recorded[1]):
                found["with"].append(round_of(case, *recorded, clients))
        record_us = min(alone_us(recorded) for _ in range(3))
    tokens_us = 1e6 * arguments.streams / max(one["per_core_s"] for one in found["without"])
    best = {name: max(one["per_core_s"] for one in rounds) for name, rounds in found.items()}
    report(
        "step_viewer",
        title=f"{arguments.streams} streams of {arguments.tokens} tokens: tokens per second of CPU time",
        rows=[{"records and viewer": name, "per_core_s": value} for name, value in best.items()],
        figures={
            "with_over_without": best["with"] / best["without"],
            "record_us": record_us,
            "tokens_of_a_step_us": tokens_us,
            "share": record_us / tokens_us,
        },
        settings={"streams": arguments.streams, "tokens": arguments.tokens, "repeats": arguments.repeats},
        repeats=found,
    )
