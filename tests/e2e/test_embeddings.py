"""/v1/embeddings with the official client: vectors equal those of transformers."""

import base64

import numpy as np
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.checkpoint import DEMO_MODEL

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
