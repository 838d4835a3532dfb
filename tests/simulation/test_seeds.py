"""Random workloads at several depths: every answer equals the reference, every rule holds after every transition."""

import os
from collections import Counter

import pytest

from tests.simulation.driver import play, play_peers
from tests.simulation.workload import draw

SOAK = os.environ.get("RUNAHEAD_SOAK") == "1"
SEEDS, CHUNK = (100_000, 1_000) if SOAK else (66, 66)

MUST_HAPPEN = [
    "preemptions", "displacements", "stale deliveries", "stops while preempted", "prefix hits", "chunked prefills",
    "resumed", "replays", "numbers reused", "frontend drops", "policies: chunked", "policies: balanced",
    "policies: phased", "policies: random", "stages: 1", "stages: 2", "stages: 4", "uneven stages",
    "first stage waited", "arrivals between epochs", "aborts between epochs", "epochs: larger", "epochs: of equal size",
    "epochs: smaller", "epochs: a request no longer fits", "epochs: ended in flight", "adopted blocks",
    "epochs: ended twice", "epochs: ended with a filled cache", "epochs: ended with fences",
    "epochs: ended with results held back", "epochs: ended with results on the way", "epochs: ended with stale rows",
    "late results: epoch ended", "late results: of a step id that is in flight again", "prefix hits in another epoch",
    "resumed in another epoch", "results out of order", "resets in flight: running=True",
    "resets in flight: running=False", "late results: repeated", "late results: old epoch", "aborts: waiting",
    "aborts: prefill in flight", "aborts: decode in flight", "aborts: preempted", "aborts: stale rows in flight",
    "aborts: finished", "stops: EOS", "stops: stop token", "stops: max_tokens", "stops: context",
    "stops: on the first token", "stops: on the last token", "stops held back by min_tokens",
    "stops: matched by a grammar", "stops: grammar failed", "embeddings: LAST", "embeddings: MEAN", "embeddings: MODEL",
    "whole prompts that wait for the next step", "log-probabilities", "prompt log-probabilities twice",
    "replays with a grammar", "grammars: ready", "grammars: refused", "grammars: of an ended request",
    "grammars: ready between epochs", "sampling: waits for tokens in flight",
    "sampling: of a request that ended before", "epochs: ended with a sampling deferred", "aborts: compiling",
    "aborts: sampling deferred", "masks: late", "left out: live", "left out: with a recurrent state",
    "left out: dropped", "left out: delivered", "epochs: ended with masks being made", "adapters: failed",
    "adapters: failed after a preemption",
]  # fmt: skip


def depths_of(seed: int, speculates: bool, peers: bool) -> set[int]:
    """Return the depths at which a workload is played: all, or per change two of them in turn. Peers and the random
    policy, of which there are few, are played at all."""
    load = draw(seed, speculates)
    depths, is_rare = load.depths, peers or load.policy == "random"
    played = depths if SOAK or is_rare else (depths[(seed + 2) % len(depths)], depths[(seed + 3) % len(depths)])
    return {*played, 8} if seed % 16 == 0 else {*played}


def played(seeds: range, speculates: bool = False, tier: bool = False, peers: bool = False) -> Counter[str]:
    """Play the seeds' workloads, and return what happened."""
    happened: Counter[str] = Counter()
    for seed in seeds:
        for depth in depths_of(seed, speculates, peers):
            try:
                worlds = play_peers(seed, depth) if peers else [play(seed, depth, speculates=speculates, tier=tier)]
            except Exception as error:
                command = f".venv/bin/python -m tests.simulation.replay --seed {seed} --depth {depth}"
                command += " --speculates" * speculates + " --tier" * tier + " --peers" * peers
                pytest.fail(f"{type(error).__name__}: {error}\nreplay: {command}")
            for world in worlds:
                happened += world.coverage
                happened["preemptions"] += world.store.counters["num_preemptions"]
    return happened


@pytest.mark.timeout(3600 if SOAK else 300)
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_any_workload_at_any_depth_answers_as_the_reference(first: int) -> None:
    happened = played(range(first, first + CHUNK))
    assert [name for name in MUST_HAPPEN if not happened[name]] == [], "the simulator stopped exercising these"


MUST_HAPPEN_TO_LOADS = [
    "aborts: loading",
    "epochs: ended with loads",
    "loads: blocks",
    "loads: a block is torn",
    "loads: of a block that was given away",
    "loads: reported after their epoch",
    "loads: reported too late",
    "pins: blocks",
    "pins: of an earlier epoch",
    "pins: refused",
    "drops: blocks",
    "drops: of a load",
    "drops: of a block in the tier",
    "prefix hits in another epoch",
]

MUST_HAPPEN_TO_DRAFTS = [
    "preemptions", "displacements", "stale deliveries", "stops while preempted", "resumed in another epoch",
    "stops: EOS", "stops: stop token", "stops: max_tokens", "stops: context", "stops: matched by a grammar",
    "stops: grammar failed", "embeddings: LAST", "log-probabilities", "sampling: waits for tokens in flight",
    "aborts: sampling deferred", "masks: late", "left out: live", "drafts: planned", "drafts: verified",
    "drafts: accepted", "drafts: rows cut by a stop", "drafts: fewer than planned", "drafts: refused by a grammar",
    "drafts: stale rows of several tokens", "policies: chunked", "policies: balanced", "policies: random", "stages: 1",
    "stages: 2", "stages: 4", "uneven stages",
]  # fmt: skip


@pytest.mark.timeout(3600 if SOAK else 300)
@pytest.mark.parametrize("first", range(0, SEEDS // 3, CHUNK))
def test_any_workload_with_any_drafts_answers_as_without(first: int) -> None:
    """The oracle and the checker check every rule of drafts."""
    happened = played(range(first, first + min(CHUNK, SEEDS // 3)), speculates=True)
    assert [name for name in MUST_HAPPEN_TO_DRAFTS if not happened[name]] == []


@pytest.mark.timeout(3600 if SOAK else 300)
@pytest.mark.parametrize("first", range(0, SEEDS // 3, CHUNK))
def test_any_workload_with_a_tier_answers_as_without(first: int) -> None:
    """Loads fail, are torn, come late, or outlive their requests and their epoch. Prefixes are pinned and dropped."""
    happened = played(range(first, first + min(CHUNK, SEEDS // 3)), tier=True)
    assert [name for name in MUST_HAPPEN_TO_LOADS if not happened[name]] == []


MUST_HAPPEN_TO_FETCHES = [
    "fetches: blocks",
    "fetches: of a block that is not confirmed",
    "fetches: a block changed while it was copied",
    "loads: ahead, blocks",
    "loads: ahead, in part",
    "loads: ahead, and a request has come",
    "aborts: loading",
    "epochs: ended with loads",
    "loads: a block is torn",
    "drops: blocks",
]


@pytest.mark.timeout(3600 if SOAK else 300)
@pytest.mark.parametrize("first", range(0, SEEDS // 9, CHUNK))
def test_two_engines_that_fetch_blocks_answer_as_the_reference(first: int) -> None:
    """Both lose workers, drop prefixes and reset their caches meanwhile. Some compute a prompt that the other needs."""
    happened = played(range(first, first + min(CHUNK, SEEDS // 9)), peers=True)
    assert [name for name in MUST_HAPPEN_TO_FETCHES if not happened[name]] == []


def test_a_run_replays_exactly() -> None:
    def traced() -> list[str]:
        lines: list[str] = []
        play(11, 3, trace=lines.append)
        return lines

    assert traced() == traced()
