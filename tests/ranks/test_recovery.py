"""Ranks are killed or stopped while 32 streams run, with a spare registered: every stream finishes, and its tokens are
those of a calm run (F1, F2, F4). In float32 the native backend gives a row the same bits in every batch, so the tokens
are equal without exception."""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from protocol.requests import EnginePhase, FinishReason
from protocol.sampling import GrammarKind, SamplingParams, StructuredOutputParams
from tests.integration.scheduler.engine import Engine, EngineClient, engine

pytestmark = pytest.mark.timeout(1800)
"""Whoever waits here gives up when nothing comes further. On a busy machine much can come, and slowly."""
SOAK = os.environ.get("RUNAHEAD_SOAK") == "1"
MOMENTS = range(20 if SOAK else 3)
LETTERS = StructuredOutputParams(GrammarKind.REGEX, "([a-z]{1,9} )*")
STREAMS, TOKENS = range(32), 48
WORKER = {"backend": "native", "threads": 1, "kv_cache_memory_bytes": 64 << 20}
LAYOUTS = {"tp2": (2, 1), "tp2-drafts": (2, 1), "pp2": (1, 2), "pp2-drafts": (1, 2)} | (
    {"tp2-pp2": (2, 2), "tp2-pp2-drafts": (2, 2)} if SOAK else {}
)
DRAFTS = {"method": "eagle", "num_speculative_tokens": 3}
"""As many as pay; with stages always three, so that each has drafts in flight."""


def scheduler(layout: str) -> dict[str, object]:
    tp, pp = LAYOUTS[layout]
    drafts = {"speculative_config": DRAFTS | {"adaptive": pp == 1}} if "drafts" in layout else {}
    return drafts | {
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "max_model_len": 256,
        "heartbeat_timeout_seconds": 3.0,
    }


def generate(client: EngineClient) -> None:
    """Half of them greedy, prompts of different lengths, some with a common beginning; some with penalties, which look
    at what was said before the loss, some under a grammar, whose state outlives the workers (S2-7)."""
    for number in STREAMS:
        rng = random.Random(number)
        prompt = [300 + i for i in range(20 * (number % 3))]
        prompt += [rng.randrange(300, 4000) for _ in range(rng.randint(1, 40))]
        penalty = 1.5 if number % 4 == 1 else 0.0
        params = SamplingParams(
            max_tokens=TOKENS, temperature=float(number % 2), seed=number, presence_penalty=penalty
        )
        client.generate(number, prompt, params, structured=LETTERS if number % 4 == 2 else None)


def wait(client: EngineClient, until: Callable[[EngineClient], bool]) -> None:
    while client.state is None or not until(client):
        client.receive()


def delivered(client: EngineClient) -> int:
    return sum(map(len, client.tokens.values()))


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def calm_runs() -> dict[str, dict[int, list[int]]]:
    return {}


@pytest.fixture(scope="module")
def calm(
    layout: str, calm_runs: dict[str, dict[int, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[int]]:
    """Without drafts, which change no token (S2-1)."""
    plain = layout.removesuffix("-drafts")
    if plain not in calm_runs:
        tp, pp = LAYOUTS[plain]
        with engine(tmp_path_factory.mktemp("calm"), scheduler(plain), WORKER, tp * pp) as running:
            client = EngineClient(running.client_endpoint)
            client.wait_ready()
            generate(client)
            client.wait_finished(*STREAMS)
            client.close()
            calm_runs[plain] = client.tokens
    return calm_runs[plain]


def with_spare(running: Engine, layout: str) -> EngineClient:
    """A client of a group that serves and has a spare: the last of `running.workers`, always."""
    client = EngineClient(running.client_endpoint)
    client.wait_ready()
    running.add_worker()
    wait(client, lambda c: c.state.stats.get("num_workers") == len(running.workers))
    return client


def disturb(client: EngineClient, rng: random.Random) -> None:
    """Opens all streams and reads until a random moment."""
    client.tokens.clear()
    client.finished.clear()
    generate(client)
    goal = rng.randrange(len(STREAMS) * (TOKENS - 8))
    while delivered(client) < goal:
        client.receive()


def test_killed_ranks_cost_no_stream_a_token(layout: str, calm: dict[int, list[int]], tmp_path: Path) -> None:
    """One kill after another, of one rank's worker and then another's: each time a spare is there, and a new one comes
    after."""
    rng = random.Random(f"{layout} {os.environ.get('RUNAHEAD_SEED', '0')}")
    tp, pp = LAYOUTS[layout]
    with engine(tmp_path, scheduler(layout), WORKER, tp * pp) as running:
        client = with_spare(running, layout)
        for moment in MOMENTS:
            disturb(client, rng)
            victim = running.workers.pop(moment % (tp * pp))
            victim.kill()
            victim.wait()
            client.wait_finished(*STREAMS)
            assert {end.reason for end in client.finished.values()} == {FinishReason.LENGTH}
            assert client.tokens == calm, f"{layout}, moment {moment}"
            running.add_worker()
            client.generate(99, [1, 2, 3], SamplingParams(max_tokens=1, temperature=0.0))  # a state follows
            wait(client, lambda c: c.state.stats.get("num_workers") == tp * pp + 1)
            assert client.state is not None
            assert client.state.stats["epoch"] == moment + 2
            client.wait_finished(99)
        assert client.state.stats["kv_cache_usage_perc"] == 0
        accepted = client.state.stats.get("spec_decode_num_accepted_tokens", 0)
        assert (accepted > 100) == ("drafts" in layout)
        client.close()
        pids = [process.pid for process in running.workers]
        assert running.stop() == (0,) * (tp * pp + 2)
    assert not any(map(psutil.pid_exists, pids)), "a process was left"


@pytest.mark.parametrize("layout", LAYOUTS if SOAK else ["tp2", "pp2"], indirect=True, scope="module")
def test_stopped_rank_is_declared_dead_and_its_late_words_are_dropped(
    layout: str, calm: dict[int, list[int]], tmp_path: Path
) -> None:
    """F4. The others hang in a collective with it; they are freed without losing their weights."""
    tp, pp = LAYOUTS[layout]
    with engine(tmp_path, scheduler(layout), WORKER, tp * pp) as running:
        client = with_spare(running, layout)
        disturb(client, random.Random(layout))
        running.worker.send_signal(signal.SIGSTOP)
        wait(client, lambda c: c.state.phase is EnginePhase.RECOVERING)
        wait(client, lambda c: c.state.phase is EnginePhase.READY)
        running.worker.send_signal(signal.SIGCONT)
        client.wait_finished(*STREAMS)
        assert {end.reason for end in client.finished.values()} == {FinishReason.LENGTH}
        assert client.tokens == calm
        client.generate(99, [1, 2, 3], SamplingParams(max_tokens=1, temperature=0.0))
        wait(client, lambda c: c.state.stats.get("num_workers") == tp * pp + 1)
        assert client.state is not None
        assert client.state.stats["epoch"] == 2
        client.close()
