"""The default model behind the API: chat, streams, tools, structured output, embeddings.

In float32, where an answer does not depend on the batch. One server for all tests; its cache holds few requests.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from services.checkpoint.default_model import NAME, packaged_model
from tests.e2e.server import ServeProcess, serving

pytestmark = pytest.mark.skipif(packaged_model() is None, reason="deploy/model.txt is not installed")
SETTINGS = (
    "--dtype=float32", "--max-model-len=384", "--max-num-seqs=8", f"--kv-cache-memory-bytes={28 << 20}",
    "--enable-auto-tool-choice", "--tool-call-parser=hermes",
    '--speculative-config={"method": "ngram", "num_speculative_tokens": 3}',
)  # fmt: skip
CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def smollm2() -> Iterator[ServeProcess]:
    with serving(*SETTINGS, RUNAHEAD_MODEL="") as running:
        yield running


@pytest.fixture(scope="module")
def ask(smollm2: ServeProcess) -> Iterator[OpenAI]:
    with smollm2.client() as client:
        yield client


def test_chat_answers_and_its_stream_is_the_same(ask: OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": CAPITAL, "temperature": 0, "max_tokens": 24}
    whole = ask.chat.completions.create(**asked).choices[0]
    assert "Paris" in (whole.message.content or "")
    pieces = [chunk.choices[0] for chunk in ask.chat.completions.create(**asked, stream=True)]
    assert "".join(piece.delta.content or "" for piece in pieces) == whole.message.content
    assert pieces[-1].finish_reason == whole.finish_reason


def test_required_tool_is_called_with_valid_arguments(ask: OpenAI) -> None:
    (call,) = (
        ask.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "Add 2 and 3."}], tools=[ADD],
            tool_choice={"type": "function", "function": {"name": "add"}}, temperature=0, max_tokens=48,
        )
        .choices[0]
        .message.tool_calls
        or []
    )  # fmt: skip
    assert call.type == "function"
    assert call.function.name == "add"
    assert {type(value) for value in json.loads(call.function.arguments).values()} == {int}


def test_choice_is_one_of_those_allowed(ask: OpenAI) -> None:
    answer = ask.chat.completions.create(
        model=NAME,
        messages=CAPITAL,
        temperature=0,
        extra_body={"structured_outputs": {"choice": ["Rome", "Paris"]}},
    )
    assert answer.choices[0].message.content == "Paris"


def test_embeddings_differ_by_meaning(ask: OpenAI) -> None:
    texts = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose in March."]
    cat, kitten, rates = (item.embedding for item in ask.embeddings.create(model=NAME, input=texts).data)
    assert len(cat) == 576
    near, far = (sum(x * y for x, y in zip(cat, other, strict=True)) for other in (kitten, rates))
    assert near > far
