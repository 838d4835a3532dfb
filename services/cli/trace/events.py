"""Entries of /debug/steps as events of the Trace Event Format, which Perfetto and Chrome read.

Lanes are threads: plans and applied results of the scheduler, forward passes and samplings of each rank, one thread per
request. Slices of one thread must nest, so slices that overlap are distributed over several threads. A flow of arrows
leads from a plan to its execution on every rank, and from the rank with the result to the scheduler.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from protocol.records import RequestTimes

Event = dict[str, Any]

SCHEDULER, REQUESTS, FIRST_RANK = 1, 2, 10
"""Process ids in the trace."""
RANK_PARTS = (
    ("forward pass", "forward_began", "forward_ended"),
    ("sampling", "forward_ended", "sampled"),
    ("send", "sampled", "sent"),
)
"""Name, beginning and end of each part of a step on a rank."""
APART = 100
"""Distance between the first threads of two lanes of a process."""
RANK_TIMES = ("received", "prepared", "forward_began", "forward_ended", "sampled", "sent")
"""Fields of a rank that are moments."""


def _consistent(step: Event) -> Event:
    """Return the step with times of ranks that lie between its plan and its result.

    The offset between two clocks is measured, so a busy machine's times of a rank may be some milliseconds off.
    """
    ranks = []
    for rank in step["ranks"]:
        moments = {name: rank[name] for name in RANK_TIMES if rank[name]}
        if moments:
            earliest = step["dispatched"]
            latest = step["result_received"] if rank["returns_result"] else math.inf
            shift = max(0.0, earliest - min(moments.values()))
            shift = min(shift, latest - max(moments.values()))
            moments = {name: min(max(at + shift, earliest), latest) for name, at in moments.items()}
        ranks.append({**rank, **moments})
    return {**step, "ranks": ranks}


class TraceWriter:
    def __init__(self, entries: list[dict[str, Any]]) -> None:
        """`entries`: of /debug/steps, with rows."""
        steps = (_consistent(entry) for entry in entries if entry["kind"] == "step")
        self._steps = sorted(steps, key=lambda step: step["planned"])
        self._marks = [e for e in entries if "at" in e]
        self._requests = _merged(e for e in entries if e["kind"] == "request")
        moments = [step["planned"] for step in self._steps] + [mark["at"] for mark in self._marks]
        moments += [r["times"]["queued"] for r in self._requests.values() if r["times"]["queued"]]
        self._origin = min(moments, default=0.0)
        self._events: list[Event] = []
        self._lanes: dict[int, dict[str, tuple[int, list[float]]]] = defaultdict(dict, {SCHEDULER: {}, REQUESTS: {}})
        """By process and name: the first thread, and the end of the last slice of each; as many as overlaps need."""
        self._flows = 0
        self.num_steps = len(self._steps)
        self.num_ranks = len({rank["rank"] for step in self._steps for rank in step["ranks"]})

    def document(self) -> dict[str, Any]:
        """Return the trace as an object of JSON."""
        self._add_steps()
        self._add_requests()
        for mark in self._marks:
            name = mark["kind"].replace("_", " ")
            arguments = {"epoch": mark["epoch"], "text": mark["text"]}
            self._add("i", SCHEDULER, 1, name, mark["at"], s="g", args=arguments)
        for step in self._steps:
            self._add_counters(step)
        events = [*self._names(), *sorted(self._events, key=lambda event: event["ts"])]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def _add(self, phase: str, process: int, thread: int, name: str, at: float, **more: Any) -> None:
        self._events.append(
            {"ph": phase, "pid": process, "tid": thread, "name": name, "cat": "step", "ts": self._us(at), **more}
        )

    def _us(self, at: float) -> float:
        """Return microseconds since the first moment of the trace."""
        return round((at - self._origin) * 1e6, 3)

    def _slice(self, process: int, lane: str, name: str, began: float, ended: float, args: Event) -> int:
        """Add a slice to a free thread of a lane, whose slices are added in the order in which they begin. Return the
        thread."""
        lanes = self._lanes[process]
        first, ends = lanes.setdefault(lane, (1 + APART * len(lanes), []))
        free = next((number for number, end in enumerate(ends) if end <= began), len(ends))
        if free == len(ends):
            ends.append(0.0)
        ends[free] = max(began, ended)
        self._slice_of(process, first + free, name, began, ended, args)
        return first + free

    def _slice_of(self, process: int, thread: int, name: str, began: float, ended: float, args: Event) -> None:
        duration = max(0.0, round(self._us(ended) - self._us(began), 3))
        self._add("X", process, thread, name, began, dur=duration, args=args)

    def _flow(self, name: str, source: tuple[int, int, float], target: tuple[int, int, float]) -> None:
        """Add an arrow between two slices, each given by process, thread and a time within it."""
        self._flows += 1
        self._add("s", source[0], source[1], name, source[2], id=self._flows)
        self._add("f", target[0], target[1], name, max(source[2], target[2]), id=self._flows, bp="e")

    # -- steps ---------------------------------------------------------------------------------------------------

    def _add_steps(self) -> None:
        planned = {
            _key(step): self._slice(
                SCHEDULER, "plan", _name(step), step["planned"], step["dispatched"], _arguments(step)
            )
            for step in self._steps
        }
        executed = self._add_ranks()
        for step in sorted(self._steps, key=lambda step: float(step["result_received"])):
            received, key = step["result_received"], _key(step)
            applied = self._slice(SCHEDULER, "apply", _name(step), received, step["applied"], {})
            for rank, (process, thread, began) in executed[key].items():
                source = (SCHEDULER, planned[key], _within(step["planned"], step["dispatched"]))
                self._flow("plan", source, (process, thread, began))
                times = next(r for r in step["ranks"] if r["rank"] == rank)
                if times["returns_result"]:
                    left = _within(began, times["forward_ended"])
                    self._flow("result", (process, thread, left), (SCHEDULER, applied, received))

    def _add_ranks(self) -> dict[tuple[int, int, int], dict[int, tuple[int, int, float]]]:
        """Add the slices of all ranks. Return process, thread and beginning of the forward pass by step and rank."""
        executed: dict[tuple[int, int, int], dict[int, tuple[int, int, float]]] = defaultdict(dict)
        measured = [(rank, step) for step in self._steps for rank in step["ranks"] if rank["forward_began"]]
        for part, (name, begins, ends) in enumerate(RANK_PARTS):
            for rank, step in sorted(measured, key=lambda pair: float(pair[0][begins])):
                if not rank[begins] or not rank[ends]:
                    continue
                process, title = FIRST_RANK + rank["rank"], f"{_name(step)}: {name}" if part else _name(step)
                thread = self._slice(process, name, title, rank[begins], rank[ends], rank)
                if not part:
                    executed[_key(step)][rank["rank"]] = (process, thread, rank[begins])
        return executed

    def _add_counters(self, step: dict[str, Any]) -> None:
        at = step["dispatched"]
        for name, values in (
            ("steps in flight", {"steps": step["steps_in_flight"]}),
            ("requests", {"running": step["num_running"], "waiting": step["num_waiting"]}),
            ("tokens per step", {"prefill": step["prefill_tokens"], "decode": step["decode_tokens"]}),
            ("KV cache use, %", {"used": round(100 * step["kv_cache_usage"], 3)}),
        ):
            self._add("C", SCHEDULER, 0, name, at, args=values)

    # -- requests ------------------------------------------------------------------------------------------------

    def _add_requests(self) -> None:
        """Add a thread per request: its time in the engine, and in it queue, prefill and decode."""
        rows: dict[str, list[tuple[dict[str, Any], int]]] = defaultdict(list)
        for step in self._steps:
            for row, request in enumerate(step["requests"]):
                rows[request].append((step, row))
        for name in dict.fromkeys([*self._requests, *rows]):
            known = self._requests.get(name)
            phases = _phases(None if known is None else known["times"], rows.get(name, []))
            if not phases:
                continue
            lane = f"{name} {known['request_id'] if known else ''}".strip()
            arguments = {k: v for k, v in known.items() if k != "times"} if known else {"request": name}
            thread = self._slice(REQUESTS, lane, name, phases[0][1], phases[-1][2], arguments)
            for phase, began, ended in phases:
                self._slice_of(REQUESTS, thread, phase, began, ended, {})

    # -- names ---------------------------------------------------------------------------------------------------

    def _names(self) -> Iterable[Event]:
        """Yield the names of processes and threads, and their order."""
        for process, lanes in sorted(self._lanes.items()):
            title = {SCHEDULER: "scheduler", REQUESTS: "requests"}.get(process, f"rank {process - FIRST_RANK}")
            order = {REQUESTS: 10_000}.get(process, process)
            yield _metadata("process_name", process, 0, name=title)
            yield _metadata("process_sort_index", process, 0, sort_index=order)
            for lane, (first, ends) in lanes.items():
                for number in range(len(ends)):
                    name, thread = f"{lane} ({number + 1})" if number else lane, first + number
                    yield _metadata("thread_name", process, thread, name=name)
                    yield _metadata("thread_sort_index", process, thread, sort_index=thread)


def _metadata(kind: str, process: int, thread: int, **args: str | int) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "ts": 0, "args": args}


def _within(began: float, ended: float) -> float:
    """Return a time shortly before the end of a slice, so that an arrow is attached to this slice."""
    return max(began, ended - 1e-6)


def _key(step: dict[str, Any]) -> tuple[int, int, int]:
    return step["incarnation"], step["epoch"], step["step_id"]


def _name(step: dict[str, Any]) -> str:
    return f"step {step['step_id']}"


def _arguments(step: dict[str, Any]) -> Event:
    left_out = ("ranks", "kind", "sequence", "requests", "scheduled", "prefills", "drafted", "generated")
    return {name: value for name, value in step.items() if name not in left_out}


def _merged(entries: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return one entry per request: what is known from its first step and from its end."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        before = found.get(entry["request"], {})
        prompt = entry["num_prompt_tokens"] or before.get("num_prompt_tokens", 0)
        found[entry["request"]] = {**entry, "num_prompt_tokens": prompt}
    return found


def _phases(times: dict[str, float] | None, rows: list[tuple[dict[str, Any], int]]) -> list[tuple[str, float, float]]:
    """Return name, beginning and end of each phase. Without the request's times its steps tell them."""
    if times is not None and times["ended"]:
        return RequestTimes(**times).phases()
    if not rows:
        return []
    tokens = [step["applied"] for step, row in rows if step["generated"][row]]
    first, last = rows[0][0]["planned"], rows[-1][0]["applied"]
    if not tokens:
        return [("prefill", first, last)]
    return [("prefill", first, tokens[0]), ("decode", tokens[0], last)]
