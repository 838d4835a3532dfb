"""Ranks are killed or stopped while 32 streams run and a spare is registered.

Every stream finishes with the tokens of an undisturbed run. In float32 a row of the native backend has the same bits in
every batch (batch invariance; docs/invariants.md), so the tokens are equal without exception.
"""

import os
import random
import signal
from pathlib import Path

import psutil
import pytest

from protocol.requests import EnginePhase, FinishReason
from protocol.sampling import GrammarKind, SamplingParams, StructuredOutputParams
from tests.integration.scheduler.engine import EngineProcesses, FrontendConnection, engine

pytestmark = pytest.mark.timeout(1800)
"""Every wait here fails when no message arrives. On a busy machine messages arrive, but slowly."""
SOAK = os.environ.get("RUNAHEAD_SOAK") == "1"
MOMENTS = range(20 if SOAK else 2)
LETTERS = StructuredOutputParams(GrammarKind.REGEX, "([a-z]{1,9} )*")
STREAMS, TOKENS = range(32), 48
WORKER = {"backend": "native", "threads": 1, "kv_cache_memory_bytes": 64 << 20}
SIZES = {
    "tp2": (2, 1),
    "tp2-drafts": (2, 1),
    "pp2": (1, 2),
    "pp2-drafts": (1, 2),
    "tp2-pp2": (2, 2),
    "tp2-pp2-drafts": (2, 2),
}
LAYOUTS = [*SIZES] if SOAK else ["tp2", "pp2-drafts"]
DRAFTS = {"method": "eagle", "num_speculative_tokens": 3, "adaptive": False}
"""Always three, so that every rank has drafts in flight when one is lost."""


def scheduler(layout: str) -> dict[str, object]:
    tp, pp = SIZES[layout]
    drafts = {"speculative_config": DRAFTS} if "drafts" in layout else {}
    return drafts | {
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "max_model_len": 256,
        "heartbeat_timeout_seconds": 3.0,
    }


def generate(client: FrontendConnection) -> None:
    """Send all requests: half of them greedy, prompts of different lengths, some with a common prefix.

    Some have penalties, which depend on tokens before the loss, and some a grammar, whose state outlives the workers
    (emitted tokens only).
    """
    for number in STREAMS:
        rng = random.Random(number)
        prompt = [300 + i for i in range(20 * (number % 3))]
        prompt += [rng.randrange(300, 4000) for _ in range(rng.randint(1, 40))]
        penalty = 1.5 if number % 4 == 1 else 0.0
        params = SamplingParams(max_tokens=TOKENS, temperature=float(number % 2), seed=number, presence_penalty=penalty)
        client.generate(number, prompt, params, structured=LETTERS if number % 4 == 2 else None)


def delivered(client: FrontendConnection) -> int:
    return sum(map(len, client.tokens.values()))


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def undisturbed_runs() -> dict[str, dict[int, list[int]]]:
    return {}


@pytest.fixture(scope="module")
def undisturbed(
    layout: str, undisturbed_runs: dict[str, dict[int, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[int]]:
    """Return the tokens of an undisturbed run without drafts, which change no token (same tokens)."""
    plain = layout.removesuffix("-drafts")
    if plain not in undisturbed_runs:
        tp, pp = SIZES[plain]
        with engine(tmp_path_factory.mktemp("undisturbed"), scheduler(plain), WORKER, tp * pp) as running:
            client = running.connect()
            generate(client)
            client.wait_finished(*STREAMS)
            undisturbed_runs[plain] = client.tokens
    return undisturbed_runs[plain]


def with_spare(running: EngineProcesses, layout: str) -> FrontendConnection:
    """Return the client of a group that serves and has a spare, which is the last of `running.workers`."""
    client = running.connect()
    running.add_worker()
    client.wait_state(lambda state: state.stats.get("num_workers") == len(running.workers))
    return client


def disturb(client: FrontendConnection, rng: random.Random) -> None:
    """Open all streams and read until a random moment."""
    client.tokens.clear()
    client.finished.clear()
    generate(client)
    goal = rng.randrange(len(STREAMS) * (TOKENS - 8))
    client.read_until(lambda: delivered(client) >= goal)


def test_killed_ranks_cost_no_stream_a_token(layout: str, undisturbed: dict[int, list[int]], tmp_path: Path) -> None:
    """The workers of the ranks are killed one after another. Each time a spare is registered, and a new one is added
    afterwards."""
    rng = random.Random(f"{layout} {os.environ.get('RUNAHEAD_SEED', '0')}")
    tp, pp = SIZES[layout]
    with engine(tmp_path, scheduler(layout), WORKER, tp * pp) as running:
        client = with_spare(running, layout)
        for moment in MOMENTS:
            disturb(client, rng)
            victim = running.workers.pop(moment % (tp * pp))
            victim.kill()
            victim.wait()
            client.wait_finished(*STREAMS)
            assert {end.reason for end in client.finished.values()} == {FinishReason.LENGTH}
            assert client.tokens == undisturbed, f"{layout}, moment {moment}"
            running.add_worker()
            client.generate(99, [1, 2, 3], SamplingParams(max_tokens=1, temperature=0.0))  # a state follows
            client.wait_state(lambda state: state.stats.get("num_workers") == tp * pp + 1)
            assert client.state.stats["epoch"] == moment + 2
            client.wait_finished(99)
        client.wait_state(lambda state: state.stats["kv_cache_usage_perc"] == 0)
        accepted = client.state.stats.get("spec_decode_num_accepted_tokens", 0)
        assert (accepted > 100) == ("drafts" in layout)
        pids = [process.pid for process in running.workers]
        assert running.stop() == (0,) * (tp * pp + 2)
    assert not any(map(psutil.pid_exists, pids)), "a process was left"


@pytest.mark.parametrize("layout", LAYOUTS if SOAK else ["tp2"], indirect=True, scope="module")
def test_a_stopped_rank_is_declared_dead_and_its_late_messages_are_dropped(
    layout: str, undisturbed: dict[int, list[int]], tmp_path: Path
) -> None:
    """The other ranks hang in a collective with it; their wait ends and they keep their weights."""
    tp, pp = SIZES[layout]
    with engine(tmp_path, scheduler(layout), WORKER, tp * pp) as running:
        client = with_spare(running, layout)
        disturb(client, random.Random(layout))
        running.worker.send_signal(signal.SIGSTOP)
        client.wait_state(lambda state: state.phase is EnginePhase.RECOVERING)
        client.wait_state(lambda state: state.phase is EnginePhase.READY)
        running.worker.send_signal(signal.SIGCONT)
        client.wait_finished(*STREAMS)
        assert {end.reason for end in client.finished.values()} == {FinishReason.LENGTH}
        assert client.tokens == undisturbed
        client.generate(99, [1, 2, 3], SamplingParams(max_tokens=1, temperature=0.0))
        client.wait_state(lambda state: state.stats.get("num_workers") == tp * pp + 1)
        assert client.state.stats["epoch"] == 2
