"""The file of `--step-trace`."""

import json
from pathlib import Path
from typing import Any

from protocol.requests import FinishReason
from tests.integration.scheduler.engine import engine


def read_steps(trace: Path) -> dict[int, dict[str, Any]]:
    """Return the steps of the first epoch by step id. None is missing after an orderly end."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    steps = {line["step_id"]: line for line in lines if line["kind"] == "step"}
    assert sorted(steps) == list(range(1, len(steps) + 1))
    return steps


def serve_traced(
    directory: Path,
    scheduler: dict[str, object],
    worker: dict[str, object],
    numbers: range,
    tokens: int,
    ranks: int = 1,
) -> tuple[dict[int, list[int]], float]:
    """Serve requests of different lengths. Return their tokens, and the share of steps whose successor was dispatched
    before their result arrived."""
    directory.mkdir()
    trace = directory / "trace.jsonl"
    with engine(directory, {**scheduler, "step_trace": str(trace)}, worker, ranks) as running:
        client = running.connect()
        client.generate_all(numbers, tokens, growth=12)
        client.wait_finished(*numbers)
        assert {finish.reason for finish in client.finished.values()} == {FinishReason.LENGTH}
        assert set(running.stop()) == {0}
    steps = read_steps(trace)
    pairs = [(steps[step_id], steps[step_id + 1]) for step_id in steps if step_id + 1 in steps]
    return client.tokens, sum(after["dispatched"] < before["result_received"] for before, after in pairs) / len(pairs)


def in_flight(trace: Path) -> list[int]:
    """Return the number of steps in flight after each dispatch and each result, in order of time."""
    moments = []
    for step in read_steps(trace).values():
        moments += [(step["dispatched"], 1), (step["result_received"], -1)]
    changes = [change for _, change in sorted(moments)]
    return [sum(changes[: end + 1]) for end in range(len(changes))]
