"""Random workloads at several depths: every answer equals the pure reference, every invariant holds all the way."""

import os
from collections import Counter

import pytest

from tests.simulation.driver import play
from tests.simulation.workload import draw

SOAK = os.environ.get("RUNAHEAD_SOAK") == "1"
SEEDS, CHUNK = (100_000, 1_000) if SOAK else (300, 150)

MUST_HAPPEN = [
    "preemptions",
    "displacements",
    "stale deliveries",
    "stops while preempted",
    "prefix hits",
    "chunked prefills",
    "resumed",
    "replays",
    "numbers reused",
    "client drops",
    "policies: chunked",
    "policies: balanced",
    "policies: phased",
    "policies: whimsical",
    "stages: 1",
    "stages: 2",
    "stages: 4",
    "uneven stages",
    "first stage waited",
    "arrivals between epochs",
    "aborts between epochs",
    "epochs: larger",
    "epochs: of equal size",
    "epochs: smaller",
    "epochs: a request no longer fits",
    "epochs: ended in flight",
    "epochs: ended twice",
    "epochs: ended with a filled cache",
    "epochs: ended with fences",
    "epochs: ended with results held back",
    "epochs: ended with results on the way",
    "epochs: ended with stale rows",
    "late results: epoch ended",
    "late results: of a step id that is in flight again",
    "prefix hits in another epoch",
    "resumed in another epoch",
    "results out of order",
    "resets in flight: running=True",
    "resets in flight: running=False",
    "late results: repeated",
    "late results: old epoch",
    "aborts: waiting",
    "aborts: prefill in flight",
    "aborts: decode in flight",
    "aborts: preempted",
    "aborts: stale rows in flight",
    "aborts: finished",
    "stops: EOS",
    "stops: stop token",
    "stops: max_tokens",
    "stops: context",
    "stops: on the first token",
    "stops: on the last token",
    "stops held back by min_tokens",
    "stops: matched by a grammar",
    "stops: grammar failed",
    "embeddings: LAST",
    "embeddings: MEAN",
    "log-probabilities",
    "prompt log-probabilities twice",
    "replays with a grammar",
    "grammars: ready",
    "grammars: refused",
    "grammars: of nobody any more",
    "grammars: ready between epochs",
    "sampling: waits for tokens in flight",
    "sampling: of a request that ended meanwhile",
    "epochs: ended with a sampling deferred",
    "aborts: compiling",
    "aborts: sampling deferred",
]


@pytest.mark.timeout(3600 if SOAK else 300)
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_any_workload_at_any_depth_answers_as_the_reference(first: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        depths = draw(seed).depths
        for depth in depths if seed % 16 else {*depths, 8}:
            try:
                world = play(seed, depth)
            except Exception as error:
                command = f".venv/bin/python -m tests.simulation.replay --seed {seed} --depth {depth}"
                pytest.fail(f"{type(error).__name__}: {error}\nreplay: {command}")
            happened += world.coverage
            happened["preemptions"] += world.scheduler.counters["preemptions"]
    assert [name for name in MUST_HAPPEN if not happened[name]] == [], (
        "the simulator stopped exercising these"
    )


def test_a_run_replays_exactly() -> None:
    def traced() -> list[str]:
        lines: list[str] = []
        play(11, 3, trace=lines.append)
        return lines

    assert traced() == traced()
