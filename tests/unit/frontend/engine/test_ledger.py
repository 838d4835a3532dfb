"""The ledger of open requests: what is submitted again to which scheduler, and what is refused at last."""

import asyncio

import pytest

from protocol.codec import pack, unpack
from protocol.requests import Finish, FinishReason, GenerateRequest
from protocol.sampling import SamplingParams
from protocol.suspects import PROGRESS
from services.frontend.engine.ledger import GUILTY, RequestLedger
from services.frontend.engine.streams import FlushQueue, ResponseStream
from services.frontend.errors import APIError
from tests.unit.frontend.engine.test_streams import RecordingStream

FIRST, SECOND, THIRD, FOURTH = 11, 12, 13, 14
"""Incarnations."""
ENGINE, OTHER = "0", "1"


class OpenRequests:
    """A ledger with requests whose prompt is their number. Time advances by a second with each event."""

    def __init__(self, *numbers: int, max_tokens: int = 1000) -> None:
        self.closed: list[int] = []
        self.ledger = RequestLedger(self.closed.append)
        self.streams: dict[int, RecordingStream] = {}
        self._now = 100.0
        for number in numbers:
            self.open(number, max_tokens)

    def open(self, number: int, max_tokens: int = 1000, response: ResponseStream | None = None) -> None:
        self._now += 1
        stream = RecordingStream(response or ResponseStream(FlushQueue()))
        stream.number = number
        self.streams[number] = stream
        params = SamplingParams(max_tokens=max_tokens, seed=number, prompt_logprobs=0)
        request = GenerateRequest(number, pack([number]), 1, params)
        self.ledger.assign(self.ledger.open(stream, request, self._now), ENGINE)

    def connect(self, incarnation: int) -> list[GenerateRequest]:
        self._now += 1
        return self.ledger.submissions((ENGINE, incarnation), "", self._now)

    def reconnect(self, incarnation: int) -> list[GenerateRequest]:
        self.ledger.disconnected(ENGINE)
        return self.connect(incarnation)

    def deliver(self, number: int, *tokens: int, at: int | None = None) -> None:
        first = len(self.streams[number].output) if at is None else at
        self.ledger.deliver(ENGINE, [number] * len(tokens), [*range(first, first + len(tokens))], [*tokens])


def submitted(*numbers: int, max_tokens: int = 1000) -> OpenRequests:
    """Return requests that were sent to the first scheduler."""
    requests = OpenRequests(*numbers, max_tokens=max_tokens)
    requests.connect(FIRST)
    return requests


@pytest.fixture(autouse=True)
async def loop() -> None:
    """Streams are flushed by the event loop."""
    asyncio.get_running_loop()


async def test_a_request_is_sent_once_and_again_with_its_output_to_the_next_scheduler() -> None:
    requests = OpenRequests(1, 2)
    new = requests.connect(FIRST)
    assert [(r.number, r.age, r.attempts, r.incarnation) for r in new] == [(1, 0.0, 0, FIRST), (2, 0.0, 0, FIRST)]
    assert requests.connect(FIRST) == []
    requests.deliver(2, 7, 8)
    again = requests.reconnect(SECOND)
    assert [(r.number, unpack(r.token_ids).tolist(), r.num_prompt_tokens) for r in again] == [
        (1, [1], 1),
        (2, [2, 7, 8], 1),
    ]
    assert [r.params.prompt_logprobs for r in again] == [0, None], "it would be computed without the prefix cache"
    sent = [(r.attempts, r.incarnation, r.params.seed, r.params.max_tokens) for r in again]
    assert sent == [(1, SECOND, 1, 1000), (1, SECOND, 2, 1000)]
    assert again[0].age > again[1].age > 0
    assert requests.ledger.resubmitted == 2


async def test_only_the_next_index_becomes_output() -> None:
    requests = submitted(1)
    assert requests.ledger.deliver(ENGINE, [5, 1, 1], [0, 0, 1], [3, 7, 8]) == [5]
    requests.deliver(1, 7, 8, 9, at=0)
    stream = requests.streams[1]
    assert (stream.output, stream.tokens, stream.duplicates) == ([7, 8, 9], [7, 8, 9], 2)
    requests.deliver(1, 11, at=4)
    assert stream.output == [7, 8, 9]
    with pytest.raises(APIError, match="a token of this answer was lost"):
        await stream.response.last()


async def test_a_request_that_arrives_without_a_scheduler_is_new_for_the_next_one() -> None:
    requests = submitted(1)
    requests.ledger.disconnected(ENGINE)
    requests.open(2)
    assert [(r.number, r.attempts, r.age > 0) for r in requests.connect(SECOND)] == [(1, 1, True), (2, 0, False)]


async def test_a_request_that_lacks_only_its_end_ends_by_length() -> None:
    requests = submitted(1, max_tokens=2)
    requests.deliver(1, 7, 8)
    assert requests.reconnect(SECOND) == []
    assert requests.streams[1].end == Finish(1, FinishReason.LENGTH)
    assert (len(requests.ledger), [*requests.ledger.oldest(1)], requests.closed) == (0, [], [1])


async def test_suspects_are_sent_one_by_one_and_the_one_that_kills_again_is_refused() -> None:
    """1 kills every scheduler; 3 makes progress; 4 is new."""
    requests = submitted(1, 2, 3)
    requests.deliver(3, *range(PROGRESS + 1))
    requests.reconnect(SECOND)
    requests.open(4)
    assert [r.number for r in requests.connect(SECOND)] == [4]
    requests.deliver(3, *range(PROGRESS + 1))
    assert [(r.number, r.attempts) for r in requests.reconnect(THIRD)] == [(1, 2), (3, 1), (4, 1)]
    assert requests.connect(THIRD) == []
    assert [(r.number, r.attempts) for r in requests.reconnect(FOURTH)] == [(2, 2)]
    assert requests.streams[1].end == Finish(1, FinishReason.ERROR, message=GUILTY)


async def test_no_other_choice_of_a_refused_answer_is_sent() -> None:
    """It ends as soon as its handler has seen the error. If 2 crashed the scheduler before, 3 would be blamed."""
    requests = submitted(1)
    requests.open(2, response=requests.streams[1].response)
    requests.open(3)
    for incarnation in (FIRST, SECOND):
        assert len(requests.reconnect(incarnation)) == 3
    assert [r.number for r in requests.reconnect(THIRD)] == [1]
    assert [r.number for r in requests.reconnect(FOURTH)] == [3]


async def test_a_suspect_that_makes_progress_is_cleared() -> None:
    requests = OpenRequests(1, 2)
    for incarnation in (FIRST, SECOND):
        assert len(requests.reconnect(incarnation)) == 2
    assert [r.number for r in requests.reconnect(THIRD)] == [1]
    requests.deliver(1, *range(PROGRESS + 1))
    assert [r.number for r in requests.connect(THIRD)] == [2]
    requests.ledger.end(2, Finish(2, FinishReason.STOP))
    assert [(r.number, r.attempts) for r in requests.reconnect(FOURTH)] == [(1, 1)]


async def test_a_suspect_on_trial_gives_way_when_it_ends_and_begins_anew_on_another_connection() -> None:
    requests = OpenRequests(1, 2)
    for incarnation in (FIRST, SECOND):
        requests.reconnect(incarnation)
    for _ in range(2):
        assert [r.number for r in requests.reconnect(THIRD)] == [1]
    requests.ledger.disconnected(OTHER)
    assert requests.connect(THIRD) == []
    requests.ledger.end(1, Finish(1, FinishReason.STOP))
    assert [r.number for r in requests.connect(THIRD)] == [2]


async def test_an_answer_that_another_frontend_began_goes_on_with_its_model_alone() -> None:
    ledger, stream = OpenRequests(2).ledger, RecordingStream(ResponseStream(FlushQueue()))
    stream.number, stream.output = 1, [7]
    entry = ledger.open(stream, GenerateRequest(1, pack([1]), 1, SamplingParams(9)), 100.0, "one model")
    ledger.assign(entry, ENGINE)
    assert [r.number for r in ledger.submissions((ENGINE, FIRST), "another model", 100.0)] == [2]
    assert ledger.waiting == [entry]
    ledger.assign(entry, OTHER)
    (again,) = ledger.submissions((OTHER, FIRST), "one model", 100.0)
    assert (unpack(again.token_ids).tolist(), again.age > 0) == ([1, 7], True), "it precedes new requests"
    assert (1 in ledger.streams[OTHER], 1 in ledger.streams[ENGINE]) == (True, False)
    for scheduler, identity, count in (((OTHER, SECOND), "", 1), ((OTHER, THIRD), "another model", 0)):
        ledger.disconnected(OTHER)
        assert len(ledger.submissions(scheduler, identity, 100.0)) == count, "a model that is not known may be the same"


async def test_expulsions_accuse_requests_without_output_and_end_the_one_that_was_alone() -> None:
    """The scheduler reads what comes before a bad message: a request with an output since it was sent was read."""
    requests = submitted(1, 2)
    requests.deliver(2, 7)
    for attempts in (1, 2):
        requests.ledger.expelled(ENGINE)
        assert [(r.number, r.attempts) for r in requests.reconnect(FIRST)] == [(1, attempts), (2, 0)]
        requests.deliver(2, 7)
    requests.ledger.expelled(ENGINE)
    assert [r.number for r in requests.reconnect(FIRST)] == [2]
    assert requests.streams[1].end == Finish(1, FinishReason.ERROR, message=GUILTY)


async def test_a_scheduler_that_expelled_a_request_and_died_counts_once_for_it() -> None:
    requests = submitted(1)
    requests.ledger.expelled(ENGINE)
    assert [r.attempts for r in requests.reconnect(SECOND)] == [1]


async def test_a_scheduler_that_returns_does_not_count_as_dead() -> None:
    requests = submitted(1)
    requests.reconnect(SECOND)
    requests.ledger.disconnected(ENGINE)
    requests.ledger.move(1, 2, OTHER, is_fault=True)
    assert [r.attempts for r in requests.ledger.submissions((OTHER, THIRD), "", 200.0)] == [2]
    requests.ledger.disconnected("2")
    for _ in range(2):
        requests.ledger.returned((ENGINE, SECOND))
    requests.ledger.disconnected(OTHER)
    assert [r.attempts for r in requests.ledger.submissions((OTHER, FOURTH), "", 200.0)] == [2]


async def test_a_request_without_progress_is_stuck_wherever_it_waits() -> None:
    requests = submitted(1, 2)
    for now in range(202, 220):
        assert requests.ledger.stuck(now / 2, 10.0) == []
    requests.deliver(2, 7)
    assert requests.ledger.stuck(110.0, 10.0) == []
    assert requests.ledger.stuck(111.0, 10.0) == [requests.streams[1]]
    for now in range(112, 121):
        assert requests.ledger.stuck(float(now), 10.0) == [requests.streams[1]]
    assert requests.ledger.stuck(121.0, 10.0) == [requests.streams[1], requests.streams[2]]


async def test_a_clock_that_jumps_makes_no_request_stuck() -> None:
    requests = submitted(1)
    for now in (101.0, 5000.0, 5001.0, 10.0, 9000.0):
        assert requests.ledger.stuck(now, 10.0) == []
