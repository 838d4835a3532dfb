"""`auto` tools together with a form of the content: one grammar for either."""

import json

import pytest

from protocol.sampling import GrammarKind
from services.frontend.errors import APIError
from services.frontend.openai.parameters.tool_choice import ToolChoice
from services.frontend.openai.schemas.requests import ChatRequest
from services.frontend.output_formats import TOOL_FORMATS as FORMATS
from services.frontend.parsing.events import Arguments, CallStart
from tests.unit.scheduler.grammar.support import CompilerClient, matches

CITY = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
NUMBER = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
CALLS = {
    "granite": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rom"}}, {"name": "now", "arguments": {}}]',
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Rom"}}; {"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rom"}}, {"name": "now", "arguments": {}}]',
    "phi4_mini_json": 'functools[{"name": "weather", "arguments": {"city": "Rom"}}, {"name": "now", "arguments": {}}]',
}


def choice(name: str, **more: object) -> ToolChoice:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **more}
    return ToolChoice.from_body(ChatRequest.model_validate(body), FORMATS[name], auto_enabled=True)


@pytest.mark.parametrize("name", CALLS)
def test_answer_is_content_of_the_form_or_calls(compiler: CompilerClient, name: str) -> None:
    tools = choice(name, response_format=NUMBER)
    assert tools.grammar.kind is GrammarKind.STRUCTURAL_TAG

    def is_allowed(text: str) -> bool:
        return matches(compiler.grammar(tools.grammar.kind, tools.grammar.text), text)

    assert is_allowed("42")
    assert is_allowed(CALLS[name])
    for wrong in (
        "text",
        "",
        f"42{CALLS[name]}",
        CALLS[name].replace("Rom", "R\n"),
        CALLS[name].replace("now", "then"),
    ):
        assert not is_allowed(wrong), wrong
    assert tools.parser is not None
    parser = tools.parser(tools.names, True, None, tools.parameters)
    events = parser.push(CALLS[name], is_last=True)
    assert [event.name for event in events if isinstance(event, CallStart)] == ["weather", "now"]
    joined = "".join(event.text for event in events if isinstance(event, Arguments) and event.index == 0)
    assert json.loads(joined) == {"city": "Rom"}


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": 1}', "1"),
        ({"structured_outputs": {"regex": "a+/"}}, "aa/", "b"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "perhaps"),
        ({"structured_outputs": {"json": json.dumps(CITY)}}, '{"city": "Rom"}', "{}"),
    ],
)
def test_forms_of_content(compiler: CompilerClient, form: dict[str, object], good: str, bad: str) -> None:
    grammar = choice("hermes", **form).grammar
    assert matches(compiler.grammar(grammar.kind, grammar.text), good)
    assert matches(compiler.grammar(grammar.kind, grammar.text), CALLS["hermes"])
    assert not matches(compiler.grammar(grammar.kind, grammar.text), bad)


def test_one_call_at_most(compiler: CompilerClient) -> None:
    grammar = choice("hermes", response_format=NUMBER, parallel_tool_calls=False).grammar
    one, _, _ = CALLS["hermes"].partition("\n<tool_call>")
    assert matches(compiler.grammar(grammar.kind, grammar.text), one)
    assert not matches(compiler.grammar(grammar.kind, grammar.text), CALLS["hermes"])


@pytest.mark.parametrize(
    ("name", "form", "words"),
    [
        ("glm45", {"response_format": NUMBER}, "this format of calls cannot be combined with response_format"),
        ("hermes", {"structured_outputs": {"grammar": 'start: "a"'}}, "this form of content cannot be combined"),
    ],
)
def test_what_has_no_grammar_is_refused(name: str, form: dict[str, object], words: str) -> None:
    with pytest.raises(APIError, match=words):
        choice(name, **form)
