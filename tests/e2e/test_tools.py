"""Demanded calls of the demo model, which knows nothing of tools: the grammar makes what it writes valid."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
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
    {
        "type": "function",
        "function": {"name": "plan_trip", "description": "Plans a trip.", "parameters": TRIP},
    },
    {"type": "function", "function": {"name": "now"}},
]
TOKENIZER = Tokenizer(DEMO_MODEL)
SCHEMAS: dict[str, Any] = {"plan_trip": TRIP, "now": {"type": "object", "maxProperties": 0}}
ASK: list[Any] = [{"role": "user", "content": "A week in Rome, please."}]
NAMED = {"type": "function", "function": {"name": "plan_trip"}}


@pytest.fixture(scope="module")
def thinker() -> Iterator[OpenAI]:
    """A server that takes what comes before `</think>` for reasoning."""
    settings = (
        "--reasoning-parser",
        "deepseek_r1",
        "--tool-call-parser",
        "hermes",
        "--enable-auto-tool-choice",
    )
    with serving(*settings) as server, server.client() as client:
        yield client


def asked(choice: Any, seed: int, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 1.0 if seed else 0.0, "seed": seed, "max_tokens": 400}
    return {"messages": ASK, "tools": TOOLS, "tool_choice": choice, **sampling, **more}


def assert_calls_are_valid(choice: Any, demand: Any) -> None:
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    ends = "stop" if demand == NAMED else "tool_calls"
    assert (choice.finish_reason, choice.message.content) == (ends, None)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("demand", [NAMED, "required"], ids=["named", "required"])
def test_demanded_call_is_valid_and_its_stream_says_the_same(
    client: OpenAI, model: str, demand: Any, seed: int
) -> None:
    body = asked(demand, seed, model=model, parallel_tool_calls=False)
    whole = client.chat.completions.create(**body).choices[0]
    with client.chat.completions.stream(**body) as stream:
        deltas = [e.chunk.choices[0].delta for e in stream if e.type == "chunk"]
        streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        assert_calls_are_valid(choice, demand)
        assert len(choice.message.tool_calls or []) == 1
    calls = [
        [(c.function.name, c.function.arguments) for c in choice.message.tool_calls]
        for choice in (whole, streamed)
    ]
    assert calls[0] == calls[1]
    if demand == NAMED:
        assert calls[0][0][0] == "plan_trip"
        assert len([delta for delta in deltas if delta.tool_calls]) > 1, "arguments are streamed"


def test_several_choices_each_call(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(**asked(NAMED, 3, model=model, n=3))
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert_calls_are_valid(choice, NAMED)
    assert (
        len({choice.message.tool_calls[0].id for choice in answer.choices if choice.message.tool_calls}) == 3
    )


def test_call_that_max_tokens_cuts_off_is_content(client: OpenAI, model: str) -> None:
    choice = client.chat.completions.create(**asked(NAMED, 0, model=model, max_tokens=3)).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert (choice.message.content or "").startswith("{")


def test_tools_change_nothing_for_a_template_without_them(client: OpenAI, model: str) -> None:
    body = asked("none", 0, model=model, max_tokens=24)
    with_tools = client.chat.completions.create(**body)
    without = client.chat.completions.create(
        model=model, messages=ASK, temperature=0.0, seed=0, max_tokens=24
    )
    assert with_tools.choices[0].message.content == without.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="--enable-auto-tool-choice"):
        client.chat.completions.create(**asked("auto", 0, model=model))


def test_schema_that_no_grammar_can_be_made_of_is_400(client: OpenAI, model: str) -> None:
    parameters = {"type": "object", "properties": {"x": {"$ref": "http://example.com/schema"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(openai.BadRequestError, match="refers to another document"):
        client.chat.completions.create(model=model, messages=ASK, tools=[tool], tool_choice="required")


def test_grammar_begins_when_the_reasoning_has_ended(thinker: OpenAI) -> None:
    """The demo model never ends its thoughts; where the conversation has ended them, the grammar holds at once."""
    model = thinker.models.list().data[0].id
    free = thinker.chat.completions.create(model=model, messages=ASK, temperature=0.0, max_tokens=16).choices[
        0
    ]
    assert free.message.content is None
    assert free.message.reasoning.strip(), "all that comes before the closing tag"
    unended = thinker.chat.completions.create(**asked(NAMED, 0, model=model, max_tokens=16)).choices[0]
    assert unended.message.reasoning == free.message.reasoning, "nothing is constrained before its end"
    continued = [*ASK, {"role": "assistant", "content": "<think>So.</think>"}]
    body = asked(NAMED, 0, model=model) | {"messages": continued}
    more = {"continue_final_message": True, "add_generation_prompt": False}
    closed = thinker.chat.completions.create(**body, extra_body=more).choices[0]
    assert_calls_are_valid(closed, NAMED)


def test_grammar_begins_when_the_model_itself_ends_its_thoughts(thinker: OpenAI) -> None:
    """Made to say the tokens of the closing tag one after the other: each is likelier than the next, but only once."""
    model = thinker.models.list().data[0].id
    tag = TOKENIZER.encode_rendered("</think>")
    assert len(set(tag)) == len(tag)
    bias = {str(token): 100 - 15 * place for place, token in enumerate(tag)}
    body = asked(NAMED, 0, model=model, logit_bias=bias)
    choice = thinker.chat.completions.create(**body, extra_body={"repetition_penalty": 10.0}).choices[0]
    assert_calls_are_valid(choice, NAMED)
    assert choice.message.reasoning is None


def test_auto_without_a_call_is_plain_content(thinker: OpenAI) -> None:
    model = thinker.models.list().data[0].id
    continued = [*ASK, {"role": "assistant", "content": "</think>Well"}]
    body = asked("auto", 0, model=model, max_tokens=16) | {"messages": continued}
    more = {"continue_final_message": True, "add_generation_prompt": False}
    choice = thinker.chat.completions.create(**body, extra_body=more).choices[0]
    assert choice.message.content
    assert choice.message.tool_calls is None
