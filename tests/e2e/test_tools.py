"""Required tool calls of the demo model, which was not trained for tools: the grammar makes its output valid."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

from services.checkpoint import DEMO_MODEL
from services.frontend.text.tokenizer import Tokenizer
from tests.e2e.server import serving

TRIP = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "by": {"enum": ["train", "bike"]},
        "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}, "maxItems": 2},
    },
    "required": ["city", "days", "by", "stops"],
    "additionalProperties": False,
    "$defs": {
        "stop": {
            "type": "object",
            "properties": {"short": {"type": "boolean"}},
            "required": ["short"],
            "additionalProperties": False,
        }
    },
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "plan_trip", "description": "Plans a trip.", "parameters": TRIP}},
    {"type": "function", "function": {"name": "now"}},
]
TOKENIZER = Tokenizer(DEMO_MODEL)
SCHEMAS: dict[str, Any] = {"plan_trip": TRIP, "now": {"type": "object", "maxProperties": 0}}
MESSAGES: list[Any] = [{"role": "user", "content": "A week in Rome, please."}]
NAMED = {"type": "function", "function": {"name": "plan_trip"}}


@pytest.fixture(scope="module")
def reasoning_client() -> Iterator[OpenAI]:
    """A server whose outputs have reasoning up to `</think>`."""
    settings = ("--reasoning-parser", "deepseek_r1", "--tool-call-parser", "hermes", "--enable-auto-tool-choice")
    with serving(*settings) as server, server.client() as client:
        yield client


def request_of(choice: Any, seed: int, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 1.0 if seed else 0.0, "seed": seed, "max_tokens": 400}
    return {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, **sampling, **more}


def assert_calls_are_valid(choice: Any, tool_choice: Any) -> None:
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    ends = "stop" if tool_choice == NAMED else "tool_calls"
    assert (choice.finish_reason, choice.message.content) == (ends, None)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("tool_choice", [NAMED, "required"], ids=["named", "required"])
def test_required_call_is_valid_and_equals_its_stream(client: OpenAI, model: str, tool_choice: Any, seed: int) -> None:
    body = request_of(tool_choice, seed, model=model, parallel_tool_calls=False)
    whole = client.chat.completions.create(**body).choices[0]
    with client.chat.completions.stream(**body) as stream:
        deltas = [e.chunk.choices[0].delta for e in stream if e.type == "chunk"]
        streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        assert_calls_are_valid(choice, tool_choice)
        assert len(choice.message.tool_calls or []) == 1
    calls = [
        [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] for choice in (whole, streamed)
    ]
    assert calls[0] == calls[1]
    if tool_choice == NAMED:
        assert calls[0][0][0] == "plan_trip"
        assert len([delta for delta in deltas if delta.tool_calls]) > 1, "the arguments came in one chunk"


def test_grammar_begins_after_the_reasoning(reasoning_client: OpenAI) -> None:
    """The demo model never ends its reasoning. If the conversation has ended it, the grammar begins at once."""
    model = reasoning_client.models.list().data[0].id
    free = reasoning_client.chat.completions.create(
        model=model, messages=MESSAGES, temperature=0.0, max_tokens=16
    ).choices[0]
    assert free.message.content is None
    assert free.message.reasoning.strip(), "the text before the closing tag is not reasoning"
    unended = reasoning_client.chat.completions.create(**request_of(NAMED, 0, model=model, max_tokens=16)).choices[0]
    assert unended.message.reasoning == free.message.reasoning, "the reasoning is constrained"
    continued = [*MESSAGES, {"role": "assistant", "content": "<think>So.</think>"}]
    body = request_of(NAMED, 0, model=model) | {"messages": continued}
    more = {"continue_final_message": True, "add_generation_prompt": False}
    closed = reasoning_client.chat.completions.create(**body, extra_body=more).choices[0]
    assert_calls_are_valid(closed, NAMED)


def test_grammar_begins_after_the_model_ends_its_reasoning(reasoning_client: OpenAI) -> None:
    """Biases make the model generate the tokens of the closing tag in order; a penalty prevents their repetition."""
    model = reasoning_client.models.list().data[0].id
    tag = TOKENIZER.encode("</think>", add_special_tokens=False)
    assert len(set(tag)) == len(tag)
    bias = {str(token): 100 - 15 * index for index, token in enumerate(tag)}
    body = request_of(NAMED, 0, model=model, logit_bias=bias)
    choice = reasoning_client.chat.completions.create(**body, extra_body={"repetition_penalty": 10.0}).choices[0]
    assert_calls_are_valid(choice, NAMED)
    assert choice.message.reasoning is None
