"""Step records over real sockets: subscribers alone get them, and the trace file has them all."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from protocol.codec import Decoder, unpack
from protocol.epochs import number_of
from protocol.membership import output_rank
from protocol.records import EngineEventKind, StepRecord, StepRecords, Subscribe
from protocol.requests import EngineMessage, FinishReason
from protocol.sampling import SamplingParams
from protocol.transport import Client
from tests.integration.scheduler.engine import PATIENCE, EngineProcesses, FrontendConnection, engine
from tests.integration.scheduler.step_trace import in_flight, read_steps

SIM = {"backend": "sim", "sim_step_ms": 2.0, "sim_vocab_size": 1000}
LIMITS = {"max_model_len": 512}
PROMPT = [*range(40)]


class Subscriber:
    """A frontend that sends no request and subscribes to step records."""

    def __init__(self, running: EngineProcesses) -> None:
        self._client = Client(running.client_endpoint)
        running.connections.callback(self._client.close)
        self._client.handshake("frontend", "subscriber", PATIENCE)
        self._decoder: Decoder[EngineMessage] = Decoder(EngineMessage)
        self.batches: list[StepRecords] = []

    def subscribe(self, steps: bool = True) -> None:
        self._client.send(Subscribe(steps))

    @property
    def records(self) -> list[StepRecord]:
        return [record for batch in self.batches for record in batch.records]

    @property
    def generated(self) -> int:
        return sum(int(unpack(record.generated).sum()) for record in self.records)

    def receive(self) -> None:
        frame = self._client.receive(PATIENCE)
        assert frame is not None, "the scheduler is silent"
        message = self._decoder.decode(frame)
        if isinstance(message, StepRecords):
            self.batches.append(message)

    def receive_until_generated(self, tokens: int) -> None:
        while self.generated < tokens:
            self.receive()


def generate(client: FrontendConnection, *numbers: int, tokens: int = 30) -> None:
    for number in numbers:
        client.generate(number, PROMPT, SamplingParams(tokens, temperature=0.0))
    client.wait_finished(*numbers)
    assert all(client.finished[number].reason is FinishReason.LENGTH for number in numbers)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_a_subscriber_gets_every_step_with_the_times_of_every_rank(tmp_path: Path, tp: int, pp: int) -> None:
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    with engine(tmp_path, LIMITS | sizes, SIM, num_workers=tp * pp) as running:
        client = running.connect()
        subscriber = Subscriber(running)
        subscriber.subscribe()
        subscriber.receive()  # its state: the subscription is behind it on the same connection
        generate(client, 1, 2, 3)
        subscriber.receive_until_generated(90)
        records = subscriber.records
        assert [record.step_id for record in records] == [*range(records[0].step_id, records[-1].step_id + 1)]
        for record in records:
            assert record.planned <= record.dispatched <= record.result_received <= record.applied
            assert [entry.rank for entry in record.ranks] == [*range(tp * pp)]
            for entry in record.ranks:
                times = entry.times
                moments = (times.received, times.prepared, times.forward_began, times.forward_ended, times.sampled)
                assert all(before <= after for before, after in pairwise((*moments, times.sent)))
            assert [entry.rank for entry in record.ranks if entry.returns_result] == [output_rank(tp, pp)]
        entered = {(r.number, r.num_prompt_tokens) for b in subscriber.batches for r in b.requests if not r.outcome}
        assert entered == {(number, len(PROMPT)) for number in (1, 2, 3)}
        first = records[0]
        assert (unpack(first.scheduled)[0], first.prefills[:1]) == (len(PROMPT), b"\1")
        assert set(np.frombuffer(first.numbers, np.uint32).tolist()) <= {1, 2, 3}
        assert sum(batch.dropped for batch in subscriber.batches) == 0
        assert all(batch.sent >= record.applied for batch in subscriber.batches for record in batch.records)


def test_nobody_gets_records_without_a_subscription_or_after_it_ended(tmp_path: Path) -> None:
    with engine(tmp_path, LIMITS, SIM) as running:
        # It fails on a message that it did not subscribe to
        client = running.connect()
        subscriber = Subscriber(running)
        generate(client, 1)
        subscriber.receive()
        assert not subscriber.batches
        subscriber.subscribe()
        generate_until_recorded(client, subscriber)
        subscriber.subscribe(False)
        generate(client, 100)  # the end of the subscription is on another connection and may arrive meanwhile
        generate(client, 101)
        subscriber.subscribe()
        for number in range(102, 105):
            generate_until_recorded(client, subscriber, first=number)
        steps = [record.step_id for record in subscriber.records]
        assert max(after - before for before, after in pairwise(steps)) > 30


def generate_until_recorded(client: FrontendConnection, subscriber: Subscriber, first: int = 10) -> None:
    """Send one request and receive until one more batch of records has come."""
    before = len(subscriber.batches)
    generate(client, first)
    while len(subscriber.batches) == before:
        subscriber.receive()


def test_an_epoch_that_ends_is_an_event_and_its_successor_s_steps_are_recorded(tmp_path: Path) -> None:
    with engine(tmp_path, LIMITS, SIM) as running:
        client = running.connect()
        subscriber = Subscriber(running)
        subscriber.subscribe()
        subscriber.receive()
        client.generate(1, PROMPT, SamplingParams(300, temperature=0.0))
        client.read_until(lambda: client.tokens[1])
        _replace_worker(running)
        client.wait_finished(1)
        subscriber.receive_until_generated(300)
        kinds = [event.kind for batch in subscriber.batches for event in batch.events]
        assert kinds == [EngineEventKind.EPOCH_ENDED, EngineEventKind.EPOCH_STARTED]
        assert {number_of(record.epoch) for record in subscriber.records} == {1, 2}


def _replace_worker(running: EngineProcesses) -> None:
    running.worker.kill()
    running.add_worker()


def test_the_trace_file_has_every_step_of_every_request(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with engine(tmp_path, LIMITS | {"step_trace": str(trace)}, SIM) as running:
        client = running.connect()
        generate(client, 1, 2)
        assert running.stop() == (0, 0)
    steps = read_steps(trace)
    assert sum(sum(step["generated"]) for step in steps.values()) == 60
    assert max(in_flight(trace)) == 2
    assert all(step["ranks"][0]["forward_began"] > 0 for step in steps.values())
    assert {name for step in steps.values() for name in step["requests"]} == {"0/1", "0/2"}


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path: Path) -> None:
    with engine(tmp_path, LIMITS | {"step_trace": "/dev/full"}, SIM) as running:
        client = running.connect()
        generate(client, 1, 2)
        assert running.stop() == (0, 0)
        lines = [line for line in running.log(running.scheduler).splitlines() if "the step trace ends" in line]
    assert len(lines) == 1
    assert "/dev/full cannot be written: No space left" in lines[0]


def test_the_external_id_of_a_request_stands_in_the_scheduler_s_log(tmp_path: Path) -> None:
    with engine(tmp_path, LIMITS | {"log_level": "debug"}, SIM) as running:
        client = running.connect()
        client.generate(5, PROMPT, SamplingParams(3, temperature=0.0), request_id="cmpl-abc")
        client.wait_finished(5)
        assert running.stop() == (0, 0)
        lines = [line for line in running.log(running.scheduler).splitlines() if "request_id=cmpl-abc" in line]
    words = [line.split("request_id=cmpl-abc ")[1].split()[0] for line in lines]
    assert words == ["arrived:", "scheduled", "finished:"]
    assert "finished: LENGTH, scheduled after" in lines[-1]
