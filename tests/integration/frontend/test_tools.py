"""Tools and reasoning through the official client; the scripted scheduler sends the model's text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from tokenizers import Tokenizer as HFTokenizer

from protocol.requests import FinishReason, GenerateRequest, RequestOutputs
from protocol.sampling import GrammarKind, StructuredOutputParams
from services.checkpoint import DEMO_MODEL
from tests.integration.frontend.declared import check_answer
from tests.integration.frontend.scripted import (
    TOKENIZER,
    Frontend,
    ScriptedScheduler,
    answering,
    ended,
    ids_of,
    one_by_one,
    prompt_of,
    scripted,
    silent,
    tokens,
)

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Now.", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, CLOCK]
ASK = [{"role": "user", "content": "Is it raining in Köln?"}]
ARGUMENTS = '{"city": "Köln 世界"}'
TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}[{{ c.id }}:{{ c.function.name }}:"
    "{{ c.function.arguments.city }}]{% endfor %}{% endif %}{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}"
    "{% if m.reasoning_content %}~{{ m.reasoning_content }}~{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if thinking is defined %}"
    "{{ '<think>' if thinking else '<think></think>' }}{% endif %}{% endif %}"
)
SPELLED = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
    '\n<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "llama3_json": f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}; {{"name": "now", "parameters": {{}}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}, '
    '{"name": "now", "arguments": {}}]',
}
CALLS = [("get_weather", ARGUMENTS), ("now", "{}")]


@pytest.fixture(scope="module", params=sorted(SPELLED))
def spoken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Run a frontend for models that write calls in one format and reason like Qwen3."""
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    settings = {"enable_auto_tool_choice": True, "tool_call_parser": request.param, "reasoning_parser": "qwen3"}
    with scripted(served_model_name=["demo"], chat_template=str(template), **settings) as (frontend, scheduler):
        yield frontend, scheduler, SPELLED[request.param]


@pytest.fixture
def pair(spoken: Any) -> tuple[Frontend, ScriptedScheduler]:
    spoken[1].script(silent)
    return spoken[0], spoken[1]


def streamed(frontend: Frontend, **asked: Any) -> tuple[Any, list[Any]]:
    """Return the choice that the official client accumulates, and its chunks."""
    with frontend.client() as client, client.chat.completions.stream(model="demo", messages=ASK, **asked) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        return stream.get_final_completion().choices[0], chunks


def whole(frontend: Frontend, **asked: Any) -> Any:
    with frontend.client() as client:
        return client.chat.completions.create(model="demo", messages=ASK, **asked).choices[0]


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]


def test_calls_whole_and_streamed_with_reasoning_before_and_results_after(spoken: Any) -> None:
    frontend, scheduler, spelled = spoken
    scheduler.script(answering(f"<think>\nWhere?\n</think>\n\n{spelled}"))
    answer = whole(frontend, tools=TOOLS)
    stream, chunks = streamed(frontend, tools=TOOLS)
    for choice in (answer, stream):
        assert calls_of(choice) == CALLS
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert choice.message.reasoning_content == choice.message.reasoning == "Where?"
        assert len({call.id for call in choice.message.tool_calls}) == 2
    deltas = [call for c in chunks for d in [c.choices[0].delta] for call in d.tool_calls or []]
    assert [d.function.name for d in deltas if d.id] == ["get_weather", "now"]
    assert all(d.type == "function" for d in deltas if d.id)
    assert [c.choices[0].finish_reason for c in chunks].count("tool_calls") == 1

    scheduler.script(answering("It does."))
    result = {"role": "tool", "tool_call_id": answer.message.tool_calls[0].id, "content": "rain"}
    with frontend.client() as client:
        more = [*ASK, answer.message, result]
        said = client.chat.completions.create(model="demo", messages=more, tools=TOOLS).choices[0]
    assert (said.message.content, said.message.tool_calls, said.finish_reason) == ("It does.", None, "stop")
    prompt = prompt_of(scheduler.request())
    first, second = answer.message.tool_calls
    assert prompt == (
        f"<tools>{json.dumps(WEATHER)}{json.dumps(CLOCK)}</tools><user>{ASK[0]['content']}"
        f"<assistant>[{first.id}:get_weather:Köln 世界][{second.id}:now:]~Where?~<tool>rain({first.id})<assistant>"
    )


def test_arguments_are_streamed_while_the_model_writes_them(spoken: Any) -> None:
    frontend, scheduler, spelled = spoken
    ids, start = ids_of(spelled), len(ids_of(spelled[: spelled.index("city")]))
    scheduler.script(lambda request: [tokens(request.number, ids[:start])])
    told = ""
    with frontend.client() as client:
        stream = iter(client.chat.completions.create(model="demo", messages=ASK, tools=TOOLS, stream=True))
        calls = (call for chunk in stream for call in chunk.choices[0].delta.tool_calls or [])
        number = scheduler.request().number
        for index in range(start, start + 2):  # the next token is sent when the one before it was received
            call = next(calls)
            assert call.index == 0
            told += call.function.arguments
            assert ARGUMENTS.startswith(told)
            scheduler.send(tokens(number, [ids[index]], index))
        scheduler.send(tokens(number, ids[start + 2 :], start + 2))
        scheduler.send(ended(number))
        told += "".join(call.function.arguments for call in calls)
    assert told == ARGUMENTS + "{}"


def test_content_with_calls_and_with_at_most_one_call(spoken: Any) -> None:
    frontend, scheduler, spelled = spoken
    marked = f"<|python_tag|>{spelled}" if spelled.startswith("{") else spelled
    scheduler.script(answering(f"I will look.\n{marked}"))
    one = {"tools": TOOLS, "parallel_tool_calls": False}
    for choice in (whole(frontend, **one), streamed(frontend, **one)[0]):
        assert choice.message.content == "I will look."
        assert calls_of(choice) == CALLS[:1]
        assert choice.finish_reason == "tool_calls"


def test_each_of_several_choices_has_its_own_calls(spoken: Any) -> None:
    frontend, scheduler, spelled = spoken

    def alternating(request: GenerateRequest) -> list[RequestOutputs]:
        """Send the choices' tokens in turn, when the last choice has arrived."""
        if len(scheduler.requests) < 3:
            return []
        texts = [spelled, "plain text", spelled]
        each = [one_by_one(r, ids_of(text)) for r, text in zip(scheduler.requests, texts, strict=True)]
        longest = max(map(len, each))
        return [outputs[i] for i in range(longest) for outputs in each if i < len(outputs)]

    scheduler.script(alternating)
    with frontend.client() as client:
        answer = client.chat.completions.create(model="demo", messages=ASK, tools=TOOLS, n=3)
        scheduler.script(alternating)
        with client.chat.completions.stream(model="demo", messages=ASK, tools=TOOLS, n=3) as stream:
            deltas = [
                (event.chunk.choices[0].index, event.chunk.choices[0].delta)
                for event in stream
                if event.type == "chunk"
            ]
            final = stream.get_final_completion()
    for choices in (answer.choices, sorted(final.choices, key=lambda c: c.index)):
        assert [calls_of(choice) for choice in choices] == [CALLS, [], CALLS]
        assert [choice.finish_reason for choice in choices] == ["tool_calls", "stop", "tool_calls"]
        assert choices[1].message.content == "plain text"
    assert sorted(index for index, delta in deltas if delta.role) == [0, 1, 2], "once for each"


def test_tool_choice_none_leaves_the_text_unchanged_and_the_tools_in_the_prompt(spoken: Any) -> None:
    frontend, scheduler, spelled = spoken
    scheduler.script(answering(spelled))
    for answer in (whole(frontend, tools=TOOLS, tool_choice="none"), whole(frontend, tools=[])):
        assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == (spelled, None, "stop")
    assert "<tools>" in prompt_of(scheduler.request())
    assert scheduler.request().structured is None


def schema_of(request: GenerateRequest) -> Any:
    structured = request.structured
    assert isinstance(structured, StructuredOutputParams)
    assert structured.kind is GrammarKind.JSON
    return msgspec.json.decode(structured.text)


NAMED = {"type": "function", "function": {"name": "get_weather"}}


def test_named_tool_constrains_the_output_to_its_parameters(pair: tuple[Frontend, ScriptedScheduler]) -> None:
    frontend, scheduler = pair
    scheduler.script(answering(ARGUMENTS))
    for choice in (
        whole(frontend, tools=TOOLS, tool_choice=NAMED),
        streamed(frontend, tools=TOOLS, tool_choice=NAMED)[0],
    ):
        assert calls_of(choice) == [("get_weather", ARGUMENTS)]
        assert (choice.message.content, choice.finish_reason) == (None, "stop")
    schema = schema_of(scheduler.request())
    assert {name: schema[name] for name in CITY} == CITY


def test_required_tools_constrain_the_output_to_calls(pair: tuple[Frontend, ScriptedScheduler]) -> None:
    frontend, scheduler = pair
    text = f'[{{"name": "get_weather", "parameters": {ARGUMENTS}}}, {{"name": "now", "parameters": {{}}}}]'
    scheduler.script(answering(text))
    required = {"tools": TOOLS, "tool_choice": "required"}
    for choice in (whole(frontend, **required), streamed(frontend, **required)[0]):
        assert calls_of(choice) == CALLS
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    schema = schema_of(scheduler.request())
    assert (schema["type"], schema["minItems"], "maxItems" in schema) == ("array", 1, False)
    names = [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]]
    assert names == ["get_weather", "now"]
    whole(frontend, **required, parallel_tool_calls=False)
    assert schema_of(scheduler.request(2))["maxItems"] == 1
    whole(frontend, **required, response_format={"type": "json_object"})
    assert schema_of(scheduler.request(3)) == schema, "calls come first"
    scheduler.script(answering(text[: text.index("Köln")], reason=FinishReason.LENGTH))
    choice = whole(frontend, **required)
    assert calls_of(choice) == [("get_weather", ARGUMENTS[: ARGUMENTS.index("Köln")])]
    assert (choice.message.content, choice.finish_reason) == (None, "length")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_those_of_the_request(spoken: Any, mode: str) -> None:
    frontend, scheduler, _ = spoken
    scheduler.script(answering("It is late."))
    choice = allowed("get_weather", mode=mode)
    for fields in ({"tools": TOOLS, "tool_choice": choice}, {"tools": [WEATHER], "tool_choice": mode}):
        whole(frontend, **fields)
    first, second = scheduler.request(0), scheduler.request(1)
    assert (first.token_ids, first.structured) == (second.token_ids, second.structured)
    assert "get_weather" in prompt_of(first)


def test_grammar_begins_after_the_reasoning_of_a_reasoning_model(pair: tuple[Frontend, ScriptedScheduler]) -> None:
    frontend, scheduler = pair
    scheduler.script(answering(f"<think>hm</think>{ARGUMENTS}"))
    end = tuple(ids_of("</think>"))
    named = {"tools": TOOLS, "tool_choice": NAMED}
    answer = whole(frontend, **named)
    assert calls_of(answer) == [("get_weather", ARGUMENTS)]
    assert answer.message.reasoning == "hm"
    assert scheduler.request(0).structured.begins_after == end
    scheduler.script(answering(ARGUMENTS))
    off = {"extra_body": {"chat_template_kwargs": {"thinking": False}}}
    assert calls_of(whole(frontend, **named, **off)) == [("get_weather", ARGUMENTS)]
    assert scheduler.request(0).structured.begins_after == ()
    scheduler.script(answering(f"hm</think>{ARGUMENTS}"))
    on = {"extra_body": {"chat_template_kwargs": {"thinking": True}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    answer = whole(frontend, response_format=form, **on)
    assert (answer.message.content, answer.message.reasoning_content) == (ARGUMENTS, "hm")
    assert scheduler.request(0).structured.begins_after == end


def test_reasoning_is_omitted_on_request_and_counted(pair: tuple[Frontend, ScriptedScheduler]) -> None:
    frontend, scheduler = pair
    scheduler.script(answering("<think>secret</think>Hi"))
    hidden = {"extra_body": {"include_reasoning": False}}
    answer = whole(frontend, **hidden)
    assert answer.message.content == "Hi"
    assert "secret" not in answer.to_json()
    assert not any("secret" in chunk.to_json() for chunk in streamed(frontend, **hidden)[1])
    body = {"messages": ASK, "include_reasoning": False, "n": 2}
    usage = frontend.post("/v1/chat/completions", body).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * len(ids_of("secret"))}
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last, _, _ = frontend.post("/v1/chat/completions", {**body, **streaming}).text.split("\n\n")
    assert json.loads(last[6:])["usage"] == usage


def test_reasoning_content_and_calls_have_the_declared_fields(spoken: Any, stream: bool) -> None:
    frontend, scheduler, spelled = spoken
    scheduler.script(answering(f"<think>Where?</think>Sure. {spelled}"))
    body = {"messages": ASK, "tools": TOOLS, "n": 2, "stream": stream, "return_token_ids": True}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = frontend.post("/v1/chat/completions", body | options)
    check_answer("/v1/chat/completions", stream, response.text)


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def taking(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"function": {"name": "f", "parameters": parameters}}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "auto"}, "tool_choice", "tools"),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice", "nobody"),
    ({"tools": [CLOCK], "tool_choice": allowed("now", "nobody")}, "tool_choice", "'nobody' is not among the tools"),
    ({"tools": TOOLS, "tool_choice": allowed()}, "tool_choice", "at least 1"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice", "tool_choice.allowed_"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "now"}}, "tool_choice", "tool_choice.function: "),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "tool_choice"),
    ({"tools": TOOLS, "structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs", "this form of content"),
    ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tool_choice", "grammars"),
    ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "ignore_eos"),
    ({"tools": [taking({"type": "string"})], "tool_choice": "required"}, "tools", "must have that type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "name"),
    ({"tools": [CLOCK] * 129}, "tools", "128"),
    ({"tools": [CLOCK, CLOCK]}, "tools", "two tools are named 'now'"),
    ({"tools": [taking({"enum": ["x" * 300_000]})], "tool_choice": "required"}, "tools", "characters"),
    ({"tools": [taking(json.loads('{"not":' * 100 + "{}" + "}" * 100))], "tool_choice": "required"}, "tools", "deeply"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages", "function"),
]


@pytest.mark.parametrize(("body", "param", "word"), BAD)
def test_bad_request_is_400_and_named(
    pair: tuple[Frontend, ScriptedScheduler], body: dict[str, Any], param: str, word: str
) -> None:
    frontend, scheduler = pair
    response = frontend.post("/v1/chat/completions", {"messages": ASK, **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert word in error["message"]
    assert scheduler.requests == []


def test_without_flags_formats_of_the_chat_template_are_parsed_and_grammars_are_always_enforced(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE + '{# <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call> #}')
    with scripted(served_model_name=["demo"], chat_template=str(template)) as (frontend, scheduler):
        scheduler.script(answering(f"<think>Where?</think>{SPELLED['hermes']}"))
        for choice in (whole(frontend, tools=TOOLS), streamed(frontend, tools=TOOLS)[0]):
            assert (calls_of(choice), choice.message.reasoning) == (CALLS, "Where?")
        scheduler.script(answering(ARGUMENTS))
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
        assert whole(frontend, response_format=form).message.content == ARGUMENTS
        assert scheduler.request(0).structured.begins_after == (), "the model may not reason"
        on = {"extra_body": {"chat_template_kwargs": {"thinking": True}}}
        whole(frontend, response_format=form, **on)
        assert scheduler.request(1).structured.begins_after == tuple(ids_of("</think>"))


def test_auto_needs_a_format_and_a_flag_but_required_calls_need_neither(
    frontend: Frontend, scheduler: ScriptedScheduler
) -> None:
    with frontend.client() as client:
        with pytest.raises(openai.BadRequestError, match="needs --tool-call-parser with the format"):
            client.chat.completions.create(model="demo", messages=ASK, tools=TOOLS)
        scheduler.script(answering(ARGUMENTS))
        asked = {"model": "demo", "messages": ASK, "tools": TOOLS, "tool_choice": NAMED}
        assert calls_of(client.chat.completions.create(**asked).choices[0]) == [("get_weather", ARGUMENTS)]


def test_markers_that_are_special_tokens_are_parsed_and_eos_is_not_shown(tmp_path: Path) -> None:
    """As in Mistral's tokenizers, whose decoded text lacks them by default."""
    tokenizer = HFTokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "<think>", "</think>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").symlink_to(DEMO_MODEL / "tokenizer_config.json")
    spelled = f"<think>Hm.</think>{SPELLED['mistral']}"
    ids = tokenizer.encode(spelled, add_special_tokens=False).ids
    end, eos = tokenizer.token_to_id("</think>"), TOKENIZER.eos_token_id
    assert end in ids
    settings = {"enable_auto_tool_choice": True, "tool_call_parser": "mistral", "reasoning_parser": "deepseek_r1"}
    with scripted(tokenizer=str(tmp_path), served_model_name=["demo"], **settings) as (frontend, scheduler):
        scheduler.script(lambda request: one_by_one(request, [*ids, eos]))
        for choice in (whole(frontend, tools=TOOLS), streamed(frontend, tools=TOOLS)[0]):
            assert (calls_of(choice), choice.message.reasoning) == (CALLS, "Hm.")
            assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        whole(frontend, tools=TOOLS, tool_choice=NAMED)
        assert scheduler.request(2).structured.begins_after == (end,)
