"""Every combination of parameters on real ranks, with drafts and without.

Requests with different parameters share batches, under preemption, chunked prefill and arrivals in each step. Each gets
the tokens and log-probabilities that it gets alone, synchronously, on one rank. In float32 a row of the native backend
has the same bits in every batch (batch invariance; docs/invariants.md), so they are compared byte for byte. Quantised
weights keep the same promise; there the worker is killed and replaced as well.
"""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from protocol.codec import pack
from protocol.requests import FinishReason
from protocol.sampling import GrammarKind, SamplingParams, StructuredOutputParams
from services.checkpoint import DEMO_MODEL
from tests.integration.scheduler.engine import EngineProcesses, FrontendConnection, engine

TOKENS, EOS = 24, (2,)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer"}, "on": {"type": "boolean"}},
    "required": ["name", "size", "on"],
    "additionalProperties": False,
}
STRUCTURED = StructuredOutputParams(GrammarKind.JSON, json.dumps(SCHEMA))
PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": -0.5, "repetition_penalty": 1.3}
PARAMETERS: dict[str, dict[str, object]] = {
    "nothing": {},
    "penalties": PENALTIES,
    "bad words": {"bad_words": tuple((token,) for token in range(300, 700))},
    "bias": {"logit_bias": ((7, 100.0), (4095, 99.0))},
    "allowed": {"allowed_token_ids": pack(list(range(0, 4096, 7)))},
    "logprobs": {"logprobs": 5},
    "prompt logprobs": {"prompt_logprobs": 3},
    "structured": {"structured": STRUCTURED},
    "structured + penalties + logprobs": {"structured": STRUCTURED, **PENALTIES, "logprobs": 2},
}
COPIES = 3 if os.environ.get("RUNAHEAD_SOAK") else 2
"""Requests per entry, with other prompts and seeds; every second one is sampled, the others are greedy."""
REQUESTS = [(name, copy) for copy in range(COPIES) for name in PARAMETERS]

WORKER = {"backend": "native", "threads": 1, "kv_cache_memory_bytes": 64 << 20}
CROWD = {  # blocks for a few requests, prompts in several chunks, requests that arrive and end in every step
    "num_gpu_blocks_override": 14,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 8,
    "max_model_len": 128,
}
DRAFTS = {"num_speculative_tokens": 3, "adaptive": False}
OWN_MODEL = DRAFTS | {"method": "draft_model", "model": str(DEMO_MODEL)}
"""The model drafts for itself: most greedy drafts are accepted, most drafts of sampled or constrained rows are not."""
LOOKUP = DRAFTS | {"method": "ngram", "prompt_lookup_min": 1}
LAYOUTS = {
    "depth 1": {"batch_queue_depth": 1},
    "depth 2": {"batch_queue_depth": 2},
    "depth 3": {"batch_queue_depth": 3},
    "TP=2": {"tensor_parallel_size": 2},
    "PP=2": {"pipeline_parallel_size": 2},
    "drafts, depth 1": {"batch_queue_depth": 1, "speculative_config": LOOKUP},
    "drafts, depth 3": {"batch_queue_depth": 3, "speculative_config": OWN_MODEL},
    "drafts, TP=2": {"tensor_parallel_size": 2, "speculative_config": OWN_MODEL},
}
QUANTIZED: dict[str, dict[str, object]] = {
    "int8": {"quantization": "int8", "dtype": "bfloat16"},
    "int4": {"quantization": "int4", "dtype": "float32"},
}
"""Settings of the worker by the name of its weights; others are served as the checkpoint stores them."""
CELLS = [(layout, "plain") for layout in LAYOUTS]
CELLS += [(f"depth {depth}", weights) for weights in QUANTIZED for depth in (1, 2, 3)]
KILLED_AFTER = 6
"""Requests of a quantised run that finish before the worker is killed."""
PER_CHANGE = ("depth 3", "PP=2", "drafts, depth 1", "drafts, TP=2")
"""Each depth, kind of ranks and drafter runs with one of these; `make soak` runs all."""
QUANTIZED_PER_CHANGE = (("depth 3", "int8"), ("depth 2", "int4"))
"""Likewise for quantised weights."""


def per_change(cell: tuple[str, str]) -> bool:
    return cell[0] in PER_CHANGE if cell[1] == "plain" else cell in QUANTIZED_PER_CHANGE


Logprobs = dict[int, tuple[int, bytes, bytes]]
"""Position -> token rank, ids and values, as FrontendConnection keeps them."""
TokensAndLogprobs = tuple[list[int], Logprobs]
Answers = dict[int, TokensAndLogprobs]


def generate(client: FrontendConnection, number: int) -> None:
    """Send request `number` of REQUESTS."""
    name, copy = REQUESTS[number]
    rng = random.Random(copy)
    prompt = [rng.randrange(300, 4000) for _ in range(20 + 25 * copy)]
    parameters = dict(PARAMETERS[name])
    structured = parameters.pop("structured", None)
    eos = EOS if structured is not None else ()
    sampling = {"temperature": 0.8 * (copy % 2), "seed": copy, "eos_token_ids": eos}
    params = SamplingParams(TOKENS, **sampling, **parameters)  # type: ignore[arg-type]
    client.generate(number, prompt, params, structured=structured)  # type: ignore[arg-type]


def worker(weights: str) -> dict[str, object]:
    return WORKER | QUANTIZED.get(weights, {})


@pytest.fixture(scope="module")
def alone_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Answers]:
    """Return a function of the weights that returns each request's answer alone on one rank at depth one, with its
    prompt in one chunk."""
    scheduler = {"batch_queue_depth": 1, "max_model_len": 256, "enable_prefix_caching": False}
    made: dict[str, Answers] = {}

    def make(weights: str) -> Answers:
        if weights in made:
            return made[weights]
        with engine(tmp_path_factory.mktemp("alone"), scheduler, worker(weights)) as running:
            client = running.connect()
            answers = made[weights] = {}
            for number in range(len(REQUESTS)):
                generate(client, number)
                client.wait_finished(number)
                assert client.finished.pop(number).reason in (FinishReason.STOP, FinishReason.LENGTH)
                answers[number] = client.tokens[number], client.logprobs[number]
        return answers

    return make


@pytest.fixture(scope="module")
def alone(alone_with: Callable[[str], Answers]) -> Answers:
    return alone_with("plain")


def replace_worker(running: EngineProcesses, client: FrontendConnection) -> None:
    """Kill the worker when some requests have finished, and start another one."""
    client.read_until(lambda: len(client.finished) >= KILLED_AFTER)
    assert len(client.finished) < len(REQUESTS)
    running.workers.pop().kill()
    running.add_worker()


def assert_close(ours: Logprobs, theirs: Logprobs) -> None:
    assert ours.keys() == theirs.keys()
    for position, (_, ids, values) in ours.items():
        _, same_ids, close = theirs[position]
        assert ids[:4] == same_ids[:4]
        np.testing.assert_allclose(np.frombuffer(values, np.float32), np.frombuffer(close, np.float32), atol=1e-4)


@pytest.mark.parametrize(
    ("layout", "weights"),
    [pytest.param(*cell, marks=() if per_change(cell) else (pytest.mark.soak,)) for cell in CELLS],
)
def test_requests_of_a_batch_get_the_answers_that_they_get_alone(
    layout: str, weights: str, alone_with: Callable[[str], Answers], tmp_path: Path
) -> None:
    alone = alone_with(weights)
    config = CROWD | LAYOUTS[layout]
    ranks = 2 if "=" in layout else 1
    with engine(tmp_path, config, worker(weights), ranks) as running:
        client = running.connect()
        for number in range(len(REQUESTS)):
            generate(client, number)
            if number % 2:
                client.receive()  # the others arrive while these are served
        if weights in QUANTIZED:
            replace_worker(running, client)
        client.wait_finished(*range(len(REQUESTS)))
        drafted = sum(finish.num_draft_tokens for finish in client.finished.values())
        accepted = sum(finish.num_accepted_tokens for finish in client.finished.values())
        preemptions = sum(finish.num_preemptions for finish in client.finished.values())
        for number, request in enumerate(REQUESTS):
            tokens, logprobs = alone[number]
            assert client.tokens[number] == tokens, request
            if layout.endswith("TP=2"):  # sums in another order
                assert_close(client.logprobs[number], logprobs)
            else:
                assert client.logprobs[number] == logprobs, request
        assert client.state.stats["epoch"] == 1 + (weights in QUANTIZED)
        assert preemptions > 0
        assert bool(accepted) == bool(drafted) == ("drafts" in layout)


def test_every_parameter_visibly_changes_the_output(alone: Answers) -> None:
    """Requests of one copy differ in their parameters alone."""
    for number, (name, copy) in enumerate(REQUESTS):
        (tokens, logprobs), (plain, none) = alone[number], alone[REQUESTS.index(("nothing", copy))]
        assert not none
        assert bool(logprobs) == ("logprobs" in name)
        if name in ("nothing", "logprobs", "prompt logprobs"):
            assert tokens == plain
        else:
            assert tokens != plain, (name, copy)


def test_log_probabilities_cover_their_positions(alone: Answers) -> None:
    for number, (name, copy) in enumerate(REQUESTS):
        tokens, logprobs = alone[number]
        prompt = 20 + 25 * copy
        if name == "prompt logprobs":
            assert sorted(logprobs) == list(range(1, prompt))
        elif "logprobs" in name:
            assert sorted(logprobs) == list(range(prompt, prompt + len(tokens)))
