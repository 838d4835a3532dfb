"""The ring of step records: bounded, in order of time, and readable by viewers of any pace."""

import json

from protocol.records import EngineEvent, EngineEventKind, RequestRecord, RequestTimes
from services.frontend.steps.ring import MAX_ROWS, StepRing
from services.frontend.steps.view import entry_json
from tests.unit.frontend.steps.records import EPOCH, INCARNATION, batch, step


def test_entries_are_numbered_in_order_of_time() -> None:
    ring = StepRing(16)
    ended = RequestRecord(0, 1, outcome="STOP", times=RequestTimes(0.5, 1.0, 1.5, 2.95))
    events = [EngineEvent(EngineEventKind.EPOCH_ENDED, 2.0, EPOCH, "1 steps in flight are void")]
    ring.add(batch(step(1), step(2), events=events, dropped=7, requests=[RequestRecord(0, 1), ended]), now=5.0)
    entries, missed = ring.read(0, 10)
    found = [json.loads(entry_json(entry, with_rows=False)) for entry in entries]
    assert [entry["kind"] for entry in found] == ["dropped", "request", "step", "epoch_ended", "step", "request"]
    assert [entry["sequence"] for entry in found] == [1, 2, 3, 4, 5, 6]
    assert (missed, ring.last) == (0, 6)


def test_a_viewer_that_reads_too_slowly_misses_the_oldest() -> None:
    ring = StepRing(4)
    for step_id in range(1, 11):
        ring.add(batch(step(step_id)), now=0.0)
    entries, missed = ring.read(2, 3)
    assert ([entry.sequence for entry in entries], missed) == ([7, 8, 9], 4)
    assert ring.read(10, 3) == ([], 0)
    assert ring.read(99, 3) == ([], 0)
    assert len(ring.read(0, 99)[0]) == 4


def test_the_rows_of_large_steps_bound_the_ring_too() -> None:
    ring = StepRing(1000)
    for step_id in range(1, 101):
        ring.add(batch(step(step_id, rows=MAX_ROWS // 10)), now=0.0)
    assert len(ring.read(0, 1000)[0]) == 10


def test_an_answer_with_many_rows_ends_early() -> None:
    ring = StepRing(16)
    ring.add(batch(*(step(step_id, rows=100) for step_id in range(1, 8))), now=0.0)
    assert [len(ring.read(0, 16, rows)[0]) for rows in (700, 350, 100, 1)] == [7, 3, 1, 1]


def test_an_empty_ring() -> None:
    ring = StepRing(4)
    assert ring.read(0, 4) == ([], 0)
    assert ring.scheduler_time(1.0) is None


def test_the_clock_of_the_scheduler_is_estimated_from_the_fastest_message() -> None:
    ring = StepRing(4)
    for sent, now in ((100.0, 5.5), (101.0, 6.2), (102.0, 7.9)):
        ring.add(batch(sent=sent), now)
    assert ring.scheduler_time(10.0) == 10.0 + 94.8
    ring.on_connected()
    assert ring.scheduler_time(10.0) is None


def test_a_browser_reads_every_number_exactly() -> None:
    """An epoch in one number exceeds 2^53."""
    ring = StepRing(4)
    ring.add(batch(step(7)), now=0.0)
    (entry,), _ = ring.read(0, 1)
    found = json.loads(entry_json(entry, with_rows=True))
    assert EPOCH > 2**53
    assert (found["incarnation"], found["epoch"], found["step_id"]) == (INCARNATION, 2, 7)
    assert max(value for value in found.values() if isinstance(value, int)) < 2**53


def test_rows_are_sums_in_the_summary_and_lists_in_the_whole() -> None:
    ring = StepRing(4)
    ring.add(batch(step(1, rows=3)), now=0.0)
    (entry,), _ = ring.read(0, 1)
    whole, summary = (json.loads(entry_json(entry, with_rows)) for with_rows in (True, False))
    columns = {"requests", "scheduled", "prefills", "drafted", "generated"}
    assert {name: whole[name] for name in columns} == {
        "requests": ["0/0", "0/1", "0/2"], "scheduled": [5, 4, 4], "prefills": [True, False, False],
        "drafted": [0, 3, 3], "generated": [1, 3, 3],
    }  # fmt: skip
    assert {name: value for name, value in whole.items() if name not in columns} == summary
    assert (summary["rows"], summary["prefill_tokens"], summary["decode_tokens"]) == (3, 5, 2)
    assert (summary["draft_tokens"], summary["accepted_tokens"], summary["output_tokens"]) == (6, 4, 7)
    assert summary["ranks"][0]["returns_result"]
