"""The trace of `runahead trace`: lanes, arrows and requests by the rules of the format."""

import json
from collections import Counter
from typing import Any

import pytest

from protocol.records import EngineEvent, EngineEventKind, RequestRecord, RequestTimes
from services.cli.trace.events import FIRST_RANK, RANK_TIMES, SCHEDULER, TraceWriter
from services.frontend.steps.ring import StepRing
from services.frontend.steps.view import entry_json
from tests.unit.cli.trace_format import check
from tests.unit.frontend.steps.records import EPOCH, batch


def pipelined(step_id: int, ranks: int = 2) -> dict[str, Any]:
    """Return a step of 10 ms that is sent while the one before runs; its sampling overlaps the next forward pass."""
    began = 10.0 + 0.010 * step_id
    times = {"received": began - 0.008, "prepared": began - 0.007, "forward_began": began,
             "forward_ended": began + 0.009, "sampled": began + 0.012, "sent": began + 0.0125,
             "idle": 0.0, "plan_wait": 0.0, "forward_gap": 0.001}  # fmt: skip
    return {
        "kind": "step", "sequence": step_id, "incarnation": 1, "epoch": 1, "step_id": step_id,
        "planned": began - 0.009, "dispatched": began - 0.0085,
        "result_received": began + 0.013, "applied": began + 0.0132,
        "ranks": [{"rank": rank, "returns_result": rank == 0, **times} for rank in range(ranks)],
        "steps_in_flight": 2, "num_running": 1, "num_waiting": 0, "kv_cache_usage": 0.25,
        "rows": 1, "prefill_tokens": 5 if step_id == 1 else 0, "decode_tokens": 1, "draft_tokens": 0,
        "accepted_tokens": 0, "output_tokens": 1,
        "requests": ["0/1"], "scheduled": [1], "prefills": [step_id == 1], "drafted": [0], "generated": [1],
    }  # fmt: skip


def trace_of(**entries: Any) -> dict[str, Any]:
    """Return the trace of what the frontend keeps of the scheduler's records."""
    ring = StepRing(8)
    ring.add(batch(**entries), now=0.0)
    return TraceWriter([json.loads(entry_json(entry, True)) for entry in ring.read(0, 8)[0]]).document()


def events_of(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_steps_that_overlap_keep_the_rules_of_the_format(ranks: int) -> None:
    trace = TraceWriter([pipelined(step_id, ranks) for step_id in range(1, 30)]).document()
    arrows = check(json.loads(json.dumps(trace)))
    assert Counter(arrow.name for arrow in arrows) == {"plan": 29 * ranks, "result": 29}
    for name, source, target in arrows:
        assert source["name"] == target["name"], "an arrow leads to another step"
        assert (source if name == "plan" else target)["pid"] == SCHEDULER
    names = {e["args"]["name"] for e in events_of(trace, "M") if e["name"] == "process_name"}
    assert names == {"scheduler", "requests", *(f"rank {rank}" for rank in range(ranks))}


@pytest.mark.parametrize("measured", [RANK_TIMES, RANK_TIMES[1:], ("forward_began", "forward_ended", "sent")])
@pytest.mark.parametrize("skew", [-0.050, -0.012, 0.0, 0.012, 0.050])
def test_arrows_are_attached_though_the_clock_of_a_rank_is_off(skew: float, measured: tuple[str, ...]) -> None:
    steps = [pipelined(step_id) for step_id in range(1, 4)]
    for rank in (rank for step in steps for rank in step["ranks"]):
        rank.update({name: rank[name] + skew if name in measured else 0.0 for name in RANK_TIMES})
    trace = TraceWriter(steps).document()
    arrows = check(trace)
    assert Counter(arrow.name for arrow in arrows) == {"plan": 3 * 2, "result": 3}
    parts = {event["name"].partition(": ")[2] for event in events_of(trace, "X") if event["pid"] >= FIRST_RANK}
    assert parts == ({"", "sampling", "send"} if "sampled" in measured else {""})
    assert all(source["name"] == target["name"] for _, source, target in arrows)


def test_a_plan_is_sent_while_the_step_before_runs() -> None:
    trace = TraceWriter([pipelined(step_id) for step_id in range(1, 4)]).document()
    plan = next(e for e in events_of(trace, "X") if e["name"] == "step 3" and e["pid"] == 1)
    runs = next(e for e in events_of(trace, "X") if e["name"] == "step 2" and e["pid"] == 10)
    assert runs["ts"] < plan["ts"] + plan["dur"] < runs["ts"] + runs["dur"]


def test_a_request_has_its_phases_from_its_times() -> None:
    ended = RequestRecord(0, 1, "cmpl-1", outcome="LENGTH", times=RequestTimes(1.0, 1.5, 2.0, 4.0))
    trace = trace_of(requests=[RequestRecord(0, 1, "cmpl-1", 12), ended])
    check(trace)
    found = {event["name"]: (event["ts"], event["dur"]) for event in events_of(trace, "X")}
    assert found == {
        "0/1": (0.0, 3e6), "queue": (0.0, 0.5e6), "prefill": (0.5e6, 0.5e6), "decode": (1e6, 2e6),
    }  # fmt: skip
    (whole,) = (event for event in events_of(trace, "X") if event["name"] == "0/1")
    assert (whole["args"]["request_id"], whole["args"]["num_prompt_tokens"]) == ("cmpl-1", 12)


def test_a_request_that_has_not_ended_has_the_times_of_its_steps() -> None:
    trace = TraceWriter([pipelined(step_id) for step_id in range(1, 5)]).document()
    found = {event["name"] for event in events_of(trace, "X") if event["pid"] == 2}
    assert found == {"0/1", "prefill", "decode"}


def test_a_request_that_ended_in_the_queue_and_one_that_was_never_queued() -> None:
    queued = RequestRecord(0, 1, outcome="ABORT", times=RequestTimes(queued=1.0, ended=2.0))
    trace = trace_of(requests=[queued, RequestRecord(0, 2, outcome="ABORT")])
    check(trace)
    assert {event["name"] for event in events_of(trace, "X")} == {"0/1", "queue"}


def test_a_recovery_is_marked_in_all_lanes() -> None:
    trace = trace_of(events=[EngineEvent(EngineEventKind.EPOCH_ENDED, 1.0, EPOCH, "2 steps are void")])
    (mark,) = events_of(trace, "i")
    assert (mark["name"], mark["s"], mark["args"]["text"]) == ("epoch ended", "g", "2 steps are void")


def test_without_steps_the_trace_is_empty_and_valid() -> None:
    trace = TraceWriter([]).document()
    check(trace)
    assert events_of(trace, "X") == []
