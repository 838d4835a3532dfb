"""Rules of the Trace Event Format that viewers need."""

from collections import defaultdict
from typing import Any

ROUNDING = 0.002
"""Microseconds."""


def check(trace: dict[str, Any]) -> None:
    """Raises: AssertionError, if an event breaks a rule."""
    events = trace["traceEvents"]
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in events:
        assert event["ph"] in "XsfiCM", event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        assert isinstance(event["name"], str), event
        assert event["ts"] >= 0, event
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in slices} <= named, "a lane has no name"
    _check_nesting(slices)
    _check_flows([event for event in events if event["ph"] in "sf"], slices)


def _check_nesting(slices: list[dict[str, Any]]) -> None:
    """Slices of a thread are disjoint or one contains the other."""
    threads = defaultdict(list)
    for event in slices:
        assert event["dur"] >= 0, event
        threads[event["pid"], event["tid"]].append(event)
    for events in threads.values():
        open_until: list[float] = []
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= event["ts"] + ROUNDING:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + ROUNDING, event
            open_until.append(event["ts"] + event["dur"])


def _check_flows(flows: list[dict[str, Any]], slices: list[dict[str, Any]]) -> None:
    """Each arrow begins once and ends once, later, and both ends are inside of a slice."""
    ends = defaultdict(dict)
    for event in flows:
        assert event["ph"] not in ends[event["id"]], "an id is used twice"
        ends[event["id"]][event["ph"]] = event
        assert any(
            (other["pid"], other["tid"]) == (event["pid"], event["tid"])
            and other["ts"] - ROUNDING <= event["ts"] <= other["ts"] + other["dur"] + ROUNDING
            for other in slices
        ), f"an arrow is attached to no slice: {event}"
    for pair in ends.values():
        assert pair["s"]["ts"] <= pair["f"]["ts"] + ROUNDING
        assert pair["f"]["bp"] == "e"
        assert pair["s"]["name"] == pair["f"]["name"]
