"""/v1/embeddings with the official client: vectors equal those of transformers, also beside generation."""

import asyncio
import base64

import numpy as np
import pytest
import torch
from openai import AsyncOpenAI, OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.checkpoint import DEMO_MODEL
from tests.e2e.server import ServeProcess

TEXTS = [
    "How do I read a file line by line?",
    "import asyncio\n\nasync def main():",
    "x",
    "The heapq module implements a heap queue. " * 12,
]


@pytest.fixture(scope="module")
def references() -> list[np.ndarray]:
    """Return float32[192] of length 1 for each text: the hidden state of the last token after the final norm."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval().model
    found = []
    with torch.no_grad():
        for text in TEXTS:
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            state = model(ids, use_cache=False).last_hidden_state[0, -1]
            found.append((state / state.norm()).numpy())
    return found


@pytest.mark.parametrize("form", ["base64", "float"])
def test_vectors_equal_those_of_transformers(
    client: OpenAI, model: str, references: list[np.ndarray], form: str
) -> None:
    answer = client.embeddings.create(model=model, input=TEXTS, encoding_format=form)
    for item, expected in zip(answer.data, references, strict=True):
        ours = np.frombuffer(base64.b64decode(item.embedding), "<f4") if form == "base64" else item.embedding
        np.testing.assert_allclose(np.array(ours), expected, atol=1e-5)
    short = client.embeddings.create(model=model, input=TEXTS[0], dimensions=64).data[0].embedding
    cut = references[0][:64]
    np.testing.assert_allclose(np.array(short), cut / np.linalg.norm(cut), atol=1e-5)


async def test_embeddings_and_completions_at_the_same_time_do_not_change(
    server: ServeProcess, model: str, references: list[np.ndarray]
) -> None:
    async def complete(client: AsyncOpenAI, number: int) -> str:
        answer = await client.completions.create(
            model=model, prompt=f"Number {number} is", max_tokens=48, seed=number, temperature=float(number % 2),
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        return answer.choices[0].text

    async with server.async_client() as client:
        alone = await asyncio.gather(*(complete(client, number) for number in range(4)))
        embed = (client.embeddings.create(model=model, input=TEXTS) for _ in range(6))
        mixed = await asyncio.gather(*(complete(client, number) for number in range(4)), *embed)
    assert list(mixed[:4]) == list(alone)
    for answer in mixed[4:]:
        for item, expected in zip(answer.data, references, strict=True):
            np.testing.assert_allclose(np.array(item.embedding), expected, atol=1e-5)
