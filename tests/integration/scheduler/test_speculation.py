"""Speculation through real services on the simulator: the same answers as without, at any depth."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tokenizers import Tokenizer

from protocol.requests import FinishReason
from protocol.sampling import GrammarKind, SamplingParams, StructuredOutputParams
from services.checkpoint import DEMO_MODEL
from tests.integration.scheduler.engine import FrontendConnection, engine

TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
STAMP = StructuredOutputParams(GrammarKind.REGEX, "[0-9]{4}-[0-9]{2}-[0-9]{2}(T[0-9]{2}:[0-9]{2}){8}")
REQUESTS, TOKENS = range(18), 40
STRUCTURED = [number for number in REQUESTS if number % 6 == 5]
THREE = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}


def params(number: int) -> SamplingParams:
    """Return parameters of a greedy or sampled request, with and without ones that change the logits."""
    temperature, penalty = float(number % 2), 0.5 * (number % 3 == 0)
    return SamplingParams(
        TOKENS, temperature=temperature, seed=number, frequency_penalty=penalty, logprobs=1 if number % 4 else None
    )


def serve(directory: Path, num_workers: int = 1, aborts: bool = False, **scheduler: object) -> FrontendConnection:
    """Serve requests; return the client with every answer. `aborts`: two of three others are aborted during their
    answer."""
    sim = {"backend": "sim", "sim_step_ms": 1.0, "sim_draft_acceptance": "request"}
    sizes = {"max_model_len": 256, "max_num_seqs": 24, "settle_seconds": 0}
    with engine(directory, sizes | scheduler, sim, num_workers) as running:
        client = running.connect()
        leaving = range(100, 106 if aborts else 100)
        for number in (*leaving, *REQUESTS):
            prompt = [(number * 37 + i * 11) % 1000 for i in range(24 + number % 40)]
            structured = STAMP if number in STRUCTURED else None
            client.generate(number, prompt, params(number), structured=structured)
        client.read_until(lambda: all(client.tokens[number] for number in leaving))
        client.abort(*leaving[::3], *leaving[1::3])
        client.wait_finished(*REQUESTS)
        assert set(running.stop()) == {0}
    assert {client.finished[number].reason for number in REQUESTS} == {FinishReason.LENGTH}
    for number in STRUCTURED:
        text = TOKENIZER.decode(client.tokens[number])
        assert text[4] == text[7] == "-"
    return client


@cache
def without_drafts() -> FrontendConnection:
    with TemporaryDirectory(prefix="speculation") as directory:
        return serve(Path(directory), batch_queue_depth=1)


def counted(client: FrontendConnection) -> dict[int, tuple[int, int]]:
    finishes = {number: client.finished[number] for number in REQUESTS}
    return {n: (finish.num_draft_tokens, finish.num_accepted_tokens) for n, finish in finishes.items()}


def assert_same_answers(client: FrontendConnection) -> None:
    """Tokens and log-probabilities are the same."""
    expected = without_drafts()
    for number in REQUESTS:
        assert client.tokens[number] == expected.tokens[number], number
        assert client.logprobs[number] == expected.logprobs[number], number
    drafted, accepted = map(sum, zip(*counted(client).values(), strict=True))
    assert 0 < accepted < drafted


def test_depths_give_the_same_answers_and_accept_the_same_drafts(tmp_path: Path) -> None:
    """Without preemption, and with a budget that limits no row."""
    counts = []
    for depth in (1, 3):
        (tmp_path / str(depth)).mkdir()
        client = serve(tmp_path / str(depth), speculative_config=THREE, batch_queue_depth=depth)
        assert_same_answers(client)
        plain = counted(client)
        counts.append({number: plain[number] for number in REQUESTS if number not in STRUCTURED})
    assert counts[0] == counts[1]
    assert counted(without_drafts()) == dict.fromkeys(REQUESTS, (0, 0))


@pytest.mark.parametrize(("policy", "stages", "depth"), [("chunked", 2, 2), ("balanced", 4, 5)])
def test_stages_in_step_with_the_scheduler_and_ahead_of_it(
    tmp_path: Path, policy: str, stages: int, depth: int
) -> None:
    """With preemptions and aborts while accepted tokens are on their way to the first stage."""
    sizes: dict[str, object] = {"num_gpu_blocks_override": 32, "max_num_batched_tokens": 48}
    sizes |= {"pipeline_parallel_size": stages, "batching_policy": policy, "batch_queue_depth": depth}
    client = serve(tmp_path, stages, aborts=True, speculative_config=THREE, **sizes)
    assert sum(finish.num_preemptions for finish in client.finished.values()) > 0
    assert_same_answers(client)
