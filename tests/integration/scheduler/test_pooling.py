"""Embeddings through real services: correct beside generation, under preemption and with steps in flight."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from protocol.requests import FinishReason
from protocol.sampling import Pooling, SamplingParams
from services.checkpoint import DEMO_MODEL
from tests.integration.scheduler.engine import FrontendConnection, engine

ONE = SamplingParams(max_tokens=1, temperature=0.0)
NATIVE = {"backend": "native", "dtype": "float32", "threads": 1}
LIMITS = {"max_model_len": 256, "block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 8}
TOKENS, POOLED = range(6), range(100, 112)
"""Numbers of the requests that generate, and of pooled requests."""


def prompt(number: int) -> list[int]:
    length = 150 + number % 40 if number in POOLED else 24 + number
    return [5 + (number * 37 + i * 11) % 4000 for i in range(length)]


def pooling(number: int) -> Pooling:
    return Pooling.MEAN if number % 2 else Pooling.LAST


def run(directory: Path, pooled: bool, **scheduler: object) -> FrontendConnection:
    """Pooled prompts join generating requests, a few at a time. Half of the generating requests sample."""
    directory.mkdir()
    with engine(directory, {**LIMITS, **scheduler}, NATIVE) as running:
        client = running.connect()
        assert client.wait_ready().hidden_size == 192
        for number in TOKENS:
            params = SamplingParams(max_tokens=60, temperature=float(number % 2), seed=number)
            client.generate(number, prompt(number), params)
        for number in POOLED if pooled else ():
            while len(client.finished) < len(TOKENS) and len(client.tokens[0]) < (number - POOLED.start) * 3:
                client.receive()
            client.generate(number, prompt(number), ONE, priority=-1, pooling=pooling(number))
        client.wait_finished(*TOKENS, *(POOLED if pooled else ()))
        assert running.stop() == (0, 0)
    return client


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    """Return the tokens without pooled requests, at depth one."""
    client = run(tmp_path_factory.mktemp("alone") / "run", pooled=False, batch_queue_depth=1)
    return client.tokens


@pytest.fixture(scope="module")
def references() -> dict[int, np.ndarray]:
    """Return transformers' hidden states after the final norm, pooled."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval().model
    found = {}
    with torch.no_grad():
        for number in POOLED:
            states = model(torch.tensor([prompt(number)]), use_cache=False).last_hidden_state[0]
            found[number] = (states[-1] if pooling(number) is Pooling.LAST else states.mean(0)).numpy()
    return found


@pytest.mark.parametrize("depth", [2, 3])
def test_pooled_and_generated_under_preemption(
    tmp_path: Path, undisturbed: dict[int, list[int]], references: dict[int, np.ndarray], depth: int
) -> None:
    client = run(
        tmp_path / "mixed", pooled=True, batch_queue_depth=depth, scheduling_policy="priority",
        num_gpu_blocks_override=26,
    )  # fmt: skip
    assert sum(finish.num_preemptions for finish in client.finished.values()) > 0
    assert {number: client.tokens[number] for number in TOKENS} == undisturbed
    assert {client.finished[number].reason for number in POOLED} == {FinishReason.STOP}
    assert not any(client.tokens[number] for number in POOLED)
    for number, expected in references.items():
        ours = np.frombuffer(client.embeddings[number], np.float32)
        np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=1e-4)


def test_a_pooled_prompt_that_loses_its_seat_begins_again(tmp_path: Path, references: dict[int, np.ndarray]) -> None:
    """Prompts of ten chunks and more on one seat. Each has better priority than the one before and arrives steps
    later."""
    limits = {**LIMITS, "max_num_batched_tokens": 16, "max_num_seqs": 2, "scheduling_policy": "priority"}
    with engine(tmp_path, limits, NATIVE) as running:
        client = running.connect()
        client.generate(0, prompt(0), SamplingParams(max_tokens=80, temperature=0.0), priority=-1000)
        for place, number in enumerate(POOLED):
            while len(client.tokens[0]) < 3 * place:
                client.receive()
            client.generate(number, prompt(number), ONE, priority=-place, pooling=pooling(number))
        client.wait_finished(0, *POOLED)
        assert running.stop() == (0, 0)
    for kind in (Pooling.LAST, Pooling.MEAN):
        assert any(client.finished[n].num_preemptions for n in POOLED if pooling(n) is kind)
    for number, expected in references.items():
        ours = np.frombuffer(client.embeddings[number], np.float32)
        np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=1e-4)
