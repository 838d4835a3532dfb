"""The Trace Event Format as Perfetto reads it, so that a trace which passes here loads there without a warning.

The rules are those of Perfetto's importer (src/trace_processor/importers/json and common/slice_tracker.cc,
flow_tracker.cc): times are rounded to whole nanoseconds; the slices of a thread are disjoint or nested; an arrow is
attached to the slice of its thread that began last, so the order of events with the same time counts.
"""

import math
from collections import defaultdict
from typing import Any, NamedTuple

FIELDS = {
    "X": {"dur": (int, float), "args": dict},
    "s": {"id": int, "cat": str},
    "f": {"id": int, "cat": str, "bp": str},
    "i": {"s": str},
    "C": {"args": dict},
    "M": {"args": dict},
}
"""Phase -> what an event of it needs beside `ph`, `pid`, `tid`, `name` and `ts`."""
METADATA = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_sort_index": ("sort_index", int),
}
Event = dict[str, Any]


class Arrow(NamedTuple):
    name: str
    source: Event
    """The slice that the arrow leads from."""
    target: Event


def check(trace: dict[str, Any]) -> list[Arrow]:
    """Return the arrows as Perfetto attaches them. Raises: AssertionError, if an event breaks a rule."""
    events = trace["traceEvents"]
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in events:
        _check_fields(event)
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times), "events are not in order of time"
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xsf"}
    assert used <= named, "a lane has no name"
    processes = [e["pid"] for e in events if e["name"] == "process_name"]
    assert len(processes) == len(set(processes))
    assert {e["pid"] for e in events} <= set(processes), "a process has no name"
    return _arrows([event for event in events if event["ph"] in "Xsf"])


def _check_fields(event: Event) -> None:
    assert event["ph"] in FIELDS, event
    for name, kind in {"pid": int, "tid": int, "name": str, "ts": (int, float), **FIELDS[event["ph"]]}.items():
        assert isinstance(event[name], kind), (name, event)
        assert not isinstance(event[name], bool), (name, event)
    assert event["name"], event
    assert math.isfinite(event["ts"]), event
    assert event["ts"] >= 0, event
    assert event["pid"] > 0, event
    match event["ph"]:
        case "X":
            assert event["tid"] > 0, event  # a thread 0 becomes the main thread
            assert math.isfinite(event["dur"]), event
            assert event["dur"] >= 0, event
        case "f":
            assert event["bp"] == "e", event
        case "i":
            assert event["s"] in "gpt", event
        case "C":
            assert event["args"], event
            assert all(math.isfinite(value) for value in event["args"].values()), event
        case "M":
            key, kind = METADATA[event["name"]]
            assert isinstance(event["args"][key], kind), event
            assert event["args"][key] != "", event


def nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def _end(event: Event) -> int:
    return nanoseconds(event["ts"]) + nanoseconds(event["dur"])


def _arrows(events: list[Event]) -> list[Arrow]:
    stacks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    sources: dict[tuple[int, str, str], Event] = {}
    arrows: dict[tuple[int, str, str], Arrow] = {}
    for event in events:
        stack = stacks[event["pid"], event["tid"]]
        if event["ph"] == "X":
            _push(stack, event)
            continue
        assert stack, f"an arrow is attached to no slice: {event}"
        at = nanoseconds(event["ts"])
        assert nanoseconds(stack[-1]["ts"]) <= at <= _end(stack[-1]), f"it points beside a slice: {event}"
        key = event["id"], event["cat"], event["name"]
        if event["ph"] == "s":
            assert key not in sources, f"an id is used twice: {event}"
            sources[key] = stack[-1]
        else:
            assert key in sources, f"an arrow ends that did not begin: {event}"
            assert key not in arrows, f"an arrow ends twice: {event}"
            source, target = sources[key], stack[-1]
            assert source["ts"] <= target["ts"], f"Perfetto turns an arrow round that goes back: {event}"
            arrows[key] = Arrow(event["name"], source, target)
    assert arrows.keys() == sources.keys(), "an arrow does not end"
    return [*arrows.values()]


def _push(stack: list[Event], event: Event) -> None:
    """Begin a slice on a thread. A slice contains its beginning and not its end; empty ones stack."""
    began, ended = nanoseconds(event["ts"]), _end(event)
    while stack:
        end = _end(stack[-1])
        is_empty = stack[-1]["dur"] == 0 and event["dur"] == 0
        if not (end < began or (end == began and not is_empty)):
            break
        stack.pop()
    for other in stack:
        assert ended <= _end(other), f"slices overlap: {other} and {event}"
    stack.append(event)
