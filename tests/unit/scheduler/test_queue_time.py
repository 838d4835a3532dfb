"""Estimate of a new request's time in the queue, and the admission that depends on it. The clock is virtual."""

import pytest

from protocol.kv_groups import ONE_GROUP, KVGroup
from protocol.media import Media, MediaItem
from protocol.requests import Finish, FinishReason
from services.scheduler.core import admission
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.policies import ChunkedPolicy
from tests.simulation.requests import finishes, generate, plans
from tests.simulation.results import result_of

STEP = 0.5
"""Seconds of a step."""


class Bench:
    """An engine whose steps take STEP seconds each, with one step in flight."""

    def __init__(
        self,
        max_num_seqs: int = 8,
        num_blocks: int = 64,
        max_queue_seconds: float = 2.0,
        encoder_budget: int = 0,
        groups: tuple[KVGroup, ...] = ONE_GROUP,
        **limits_of_the_queue: int,
    ) -> None:
        limits = Limits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=20,
            max_model_len=100,
            num_blocks=num_blocks,
            block_size=4,
            enable_prefix_caching=False,
            encoder_budget=encoder_budget,
            groups=groups,
        )
        self.core = EngineCore(
            limits, ChunkedPolicy(), depth=1, vocab_size=50, max_queue_seconds=max_queue_seconds, **limits_of_the_queue
        )
        self.now, self.finishes, self._number = 0.0, list[Finish](), 0

    def add(self, num_tokens: int, max_tokens: int = 4, age: float = 0.0) -> Finish | None:
        """Return the refusal."""
        self._number += 1
        self.core.add(0, generate([self._number % 50] * num_tokens, self._number, max_tokens=max_tokens, age=age))
        return next(iter(finishes(self.core)), None)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for plan in plans(self.core):
                self.now += STEP
                self.core.advance(self.now)
                self.core.on_result(result_of(plan))
            self.finishes += finishes(self.core)


def test_nothing_is_expected_before_anything_was_measured() -> None:
    bench = Bench(max_queue_seconds=1e-9)
    for _ in range(8):
        assert bench.add(50) is None
    assert bench.core.queue_seconds() == 0


def test_the_estimate_is_the_time_for_the_prompts_before() -> None:
    """A step computes 20 tokens: 40 tokens a second. One token of each prompt's row counts as output."""
    bench = Bench()
    bench.add(60)
    bench.run(2)
    assert bench.core.queue_seconds() == pytest.approx((60 - 40) / (19 / STEP))
    bench.add(40)
    assert bench.core.queue_seconds() == pytest.approx((20 + 40) / (19 / STEP))
    assert bench.core.stats()["expected_queue_seconds"] == bench.core.queue_seconds()


def test_a_step_of_few_tokens_is_not_taken_for_the_rate_of_full_ones() -> None:
    bench = Bench()
    bench.add(5)
    bench.run(1)
    bench.add(60)
    assert bench.core.queue_seconds() == pytest.approx(60 / (19 / STEP))


def test_a_request_that_would_wait_too_long_is_refused_with_the_numbers() -> None:
    bench = Bench(max_queue_seconds=2.0)
    bench.add(60)
    bench.run(1)
    assert bench.add(40) is None
    refusal = bench.add(1)
    assert refusal.reason is FinishReason.REJECTED
    assert "would wait about 2.1 s, and the limit is 2 s" in refusal.message
    assert bench.core.stats()["admission_rejections:max_queue_seconds"] == 1
    assert bench.add(1, age=3.0) is None, "a request that was admitted before is not refused for load"
    bench.run(2)
    assert bench.add(1) is None, "the queue is shorter"


def test_what_was_admitted_before_fits_again_within_wider_limits() -> None:
    """Two seats and a queue of two: another scheduler can have had four requests, and there is room for eight."""
    bench = Bench(max_num_seqs=2, max_num_queued_reqs=2)
    assert [bench.add(1, age=3.0) for _ in range(8)] == [None] * 8
    refusal = bench.add(1, age=3.0)
    assert refusal.reason is FinishReason.REJECTED
    assert bench.add(1) is not None, "a new request meets the narrow limits"
    bench.run(50)
    assert [finish.reason for finish in bench.finishes] == [FinishReason.LENGTH] * 8
    assert bench.add(1, age=3.0) is None


def test_tokens_that_were_admitted_before_fit_again_within_wider_limits() -> None:
    bench = Bench(max_num_seqs=1, max_num_queued_tokens=50)
    longest = bench.core.epoch.limits.max_model_len
    room = 2 * (50 + longest)
    for _ in range(room // 50):
        assert bench.add(50, age=3.0) is None
    refusal = bench.add(50, age=3.0)
    assert refusal.reason is FinishReason.REJECTED


def test_files_that_were_admitted_before_fit_again_within_wider_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_OPEN_MEDIA_BYTES", 10)
    core = Bench(encoder_budget=1).core
    media = Media([MediaItem(0, 1, "digest")], bytes(5))
    for number, age in enumerate((0.0, 0.0, 0.0, 3.0, 3.0, 3.0)):
        core.add(0, generate([1], number, media=media, age=age))
    assert [finish.number for finish in finishes(core)] == [2, 5]


def test_with_all_seats_taken_the_estimate_is_the_time_until_enough_requests_have_ended() -> None:
    """Two seats, and requests of 4 steps: one ends each second."""
    bench = Bench(max_num_seqs=2, max_queue_seconds=10.0)
    for _ in range(4):
        bench.add(1)
        bench.add(1)
        bench.run(4)
    for expected in (0.0, 0.0, 1.0, 2.0, 3.0):
        assert bench.core.queue_seconds() == pytest.approx(expected)
        bench.add(1)


def test_free_blocks_of_windows_are_not_taken_for_tokens() -> None:
    """Requests end for seats before their blocks are needed, however many blocks there are."""
    expected = list[float]()
    for num_blocks in (120, 10_000):
        bench = Bench(max_num_seqs=2, num_blocks=num_blocks, groups=(KVGroup(), KVGroup("sliding_window", 8)))
        for _ in range(20):
            bench.add(50, max_tokens=40)
        bench.run(8)
        expected.append(bench.core.queue_seconds())
    assert expected[0] == expected[1] > 0


def test_running_requests_that_take_longer_than_those_before_count_with_their_age() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(1, max_tokens=1)
    bench.run(1)
    bench.add(1, max_tokens=90)
    for _ in range(3):
        before = bench.core.queue_seconds()
        bench.run(10)
        assert bench.core.queue_seconds() == pytest.approx(before + 10 * STEP, abs=STEP)


def test_a_full_kv_cache_counts_like_missing_seats() -> None:
    """Two requests hold most of the 16 blocks; seats are free."""
    bench = Bench(num_blocks=16)
    bench.add(20, max_tokens=10)
    bench.add(16, max_tokens=10)
    bench.run(4)
    assert bench.core.queue_seconds(1) == 0
    assert bench.core.queue_seconds(40) > 0


def test_an_overloaded_engine_serves_what_it_admits_in_time() -> None:
    """Ten times the load that it can serve: the refused requests are many, and no admitted one waits much longer than
    the limit; the engine computes full steps throughout."""
    bench, refused, waits = Bench(max_num_seqs=4, max_queue_seconds=2.0), 0, list[float]()
    for _ in range(400):
        for _ in range(10):
            refused += bench.add(10, max_tokens=2) is not None
        bench.run(1)
    waits = [f.times.scheduled - f.times.queued for f in bench.finishes if f.times is not None]
    assert refused > 3000
    assert len(waits) > 500, "goodput"
    assert sorted(waits[50:])[-1] <= 2 * 2.0
