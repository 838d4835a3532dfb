"""Chat bodies with tools and reasoning, rendered with realistic templates: prompts equal those of transformers."""

import copy
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from services.checkpoint import DEMO_MODEL
from services.config import FrontendConfig
from services.frontend.errors import APIError
from services.frontend.model import ServedModel
from services.frontend.openai.prompts.conversation import conversation
from services.frontend.openai.schemas.requests import ChatRequest
from services.frontend.templates.chat_template import ChatTemplate, find_template

FILES = {file.stem: file.read_text() for file in (Path(__file__).parent / "examples").glob("*.jinja")}
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Das Wetter <jetzt>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object"}}},
]
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": " Rain in Köln? "}
CALL = {"id": "abcdefghi", "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Köln", "days": [1, 2.5, null]}'}}  # fmt: skip
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"rain": true}', "name": "get_weather"}
SAID = {"role": "assistant", "content": "It rains. "}
BODIES: dict[str, dict[str, Any]] = {
    "tools": {"messages": [SYSTEM, USER], "tools": TOOLS},
    "no tools": {"messages": [SYSTEM, USER]},
    "no system": {"messages": [USER], "tools": TOOLS[:1]},
    "call and result": {"messages": [SYSTEM, USER, CALLED, RESULT], "tools": TOOLS},
    "after the result": {"messages": [USER, CALLED, RESULT, SAID, USER], "tools": TOOLS},
    "reasoning": {"messages": [USER, {**SAID, "reasoning_content": "Hm.\n"}, USER]},
    "no generation prompt": {"messages": [USER, SAID], "add_generation_prompt": False},
    "continued": {"messages": [USER, SAID], "add_generation_prompt": False, "continue_final_message": True},
    "kwargs": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False, "unknown": [1]}},
    "more kwargs": {
        "messages": [USER],
        "tools": TOOLS,
        "chat_template_kwargs": {"tools_in_user_message": False, "enable_thinking": True},
    },
}


def expected(text: str, body: dict[str, Any]) -> str:
    """Return the prompt that transformers renders, with the calls' arguments as objects."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(DEMO_MODEL / "tokenizer.json"), **SPECIAL)
    messages = copy.deepcopy(body["messages"])
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    rendered = tokenizer.apply_chat_template(
        messages,
        tools=body.get("tools"),
        chat_template=text,
        tokenize=False,
        add_generation_prompt=body.get("add_generation_prompt", True),
        continue_final_message=body.get("continue_final_message", False),
        **body.get("chat_template_kwargs", {}),
    )
    assert isinstance(rendered, str)
    return rendered


@lru_cache(maxsize=8)
def chat_template(text: str, tool_use: str | None) -> ChatTemplate:
    """Return one that renders all prompts of this template: it is a process."""
    return ChatTemplate(text, SPECIAL, tool_use)


def render(text: str, body: dict[str, Any], tool_use: str | None = None) -> str:
    said = conversation(ChatRequest.model_validate(body))
    return chat_template(text, tool_use).render(said)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_prompt_is_the_one_that_transformers_renders(name: str, body: dict[str, Any]) -> None:
    assert render(FILES[name], body) == expected(FILES[name], body)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


GEMMA = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content if messages[0].content is string else "
    "messages[0].content[0]['text'] %}{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{{ m.role }}:"
    "{{ first if loop.first }}{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}"
    "{{ part.text | trim if part.type == 'text' }}{% endfor %}{% endif %};{% endfor %}"
)
"""Shows one text of the system, as those of Gemma 3, Llama 4 and Mistral Small 3.1."""
LLAMA4 = "{% if tools %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}" + GEMMA
"""With tools the first message must be a text."""


@pytest.mark.parametrize(
    ("text", "fields", "prompt"),
    [
        (GEMMA, {}, "user:Be\nbrief.ab;assistant:cd;user:ef;"),
        (LLAMA4, {}, "user:Be\nbrief.ab;assistant:cd;user:ef;"),
        (LLAMA4, {"tools": TOOLS}, "Be\nbrief.user:a \nb;assistant:cd;user:e\n f;"),
        ("{% for m in messages %}{{ m.content }};{% endfor %}", {}, "Be\nbrief.;a \nb;c\nd;e\n f;"),
        ("{{ messages | tojson }}", {}, '"a \\nb"'),
        (
            GEMMA,
            {"add_generation_prompt": False, "continue_final_message": True},
            "user:Be\nbrief.ab;assistant:cd;user:ef",
        ),
        (
            "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %};{% endfor %}",
            {},
            "Bebrief.;a b;cd;e f;",
        ),
    ],
    ids=["gemma", "llama4", "llama4 with tools", "text", "json", "continued", "only parts"],
)
def test_template_gets_the_texts_of_a_message_one_by_one_if_it_shows_each(
    text: str, fields: dict[str, Any], prompt: str
) -> None:
    said = [("system", ["Be", "brief."]), ("user", ["a ", "b"]), ("assistant", ["c", "d"]), ("user", ["e", " f"])]
    messages = [{"role": role, "content": parts(*texts)} for role, texts in said]
    assert prompt in render(text, {"messages": messages, **fields})


@pytest.mark.parametrize("name", FILES)
def test_realistic_templates_pass_their_trial(name: str) -> None:
    chat_template(FILES[name], None).try_out()


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
     "tokenize", "bos_token", "raise_exception", "strftime_now",
     "range", "cycler", "namespace", "a b", "a.b", "__class__", "", "x" * 65],
)  # fmt: skip
def test_request_cannot_set_reserved_variables(name: str) -> None:
    body = {"messages": [USER], "chat_template_kwargs": {name: "smuggled"}}
    with pytest.raises(APIError, match="chat_template_kwargs") as refused:
        render("{{ v }}", body)
    assert (refused.value.status, refused.value.param) == (400, "chat_template_kwargs")


def test_value_from_a_request_is_text_never_a_template() -> None:
    body = {"messages": [USER], "chat_template_kwargs": {"style": "{{ 7 * 7 }}{% raw %}"}}
    assert render("[{{ style }}]", body) == "[{{ 7 * 7 }}{% raw %}]"


@pytest.mark.parametrize(
    "value", ["x" * 65_537, [[[[[[[[1]]]]]]]], list(range(1024)), {str(i): i for i in range(600)}, 2**31 + 1, -1e300,
              {"x" * 65_537: 1}, [{"a": ["y" * 40_000, "z" * 40_000]}]],
    ids=["text", "depth", "list", "object", "number", "negative", "key", "sum"],
)  # fmt: skip
def test_values_are_bounded(value: object) -> None:
    with pytest.raises(APIError, match="too large"):
        render("{{ v }}", {"messages": [USER], "chat_template_kwargs": {"v": value}})


@pytest.mark.parametrize("text", ["{{ 'x' * v }}", "{{ v * [1, 2] }}", "{{ 2 ** v }}", "{{ v ** v }}"])
def test_number_from_a_request_cannot_make_a_huge_value(text: str) -> None:
    with pytest.raises(APIError, match="too long") as refused:
        render(text, {"messages": [USER], "chat_template_kwargs": {"v": 2**31}})
    assert refused.value.status == 400
    assert (
        render("{{ 'ab' * 2 }}{{ 2 ** 3 }}{{ 1.5 * v }}", {"messages": [USER], "chat_template_kwargs": {"v": 2}})
        == "abab83.0"
    )


@pytest.mark.parametrize("arguments", ["[1]", "{", "null", "7", "{} {}", '{"a":' * 129 + "1" + "}" * 129])
def test_arguments_that_are_no_object_are_empty_so_that_the_conversation_goes_on(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    body = {"messages": [USER, {"role": "assistant", "tool_calls": [CALL, call]}]}
    assert '{"name": "f", "arguments": {}}' in render(FILES["hermes"], body)


@pytest.mark.parametrize(("given", "text"), [({"city": "Köln"}, '{"city": "Köln"}'), (None, "{}"), ({}, "{}")])
def test_arguments_may_be_the_object_itself(given: dict[str, str] | None, text: str) -> None:
    prompts = [
        render(FILES["hermes"], {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]})
        for call in ({"id": "1", "function": {"name": "f", "arguments": each}} for each in (given, text))
    ]
    assert prompts[0] == prompts[1]
    assert f'"arguments": {text}' in prompts[0]


@pytest.mark.parametrize("name", FILES)
def test_message_of_a_developer_is_one_of_the_system_where_the_template_does_not_know_the_role(name: str) -> None:
    developer = {"role": "developer", "content": "Answer in French."}
    both = {"role": "system", "content": "Be brief.\n\nAnswer in French."}
    for before, after in (
        ([developer, USER], [{**developer, "role": "system"}, USER]),
        ([SYSTEM, USER, developer], [both, USER]),
    ):
        assert render(FILES[name], {"messages": before}) == expected(FILES[name], {"messages": after})
    known = "{% for m in messages %}{{ m.role }},{{ 'x' if m.role == 'developer' }}{% endfor %}"
    assert render(known, {"messages": [SYSTEM, developer, USER]}) == "system,developer,xuser,"


@pytest.mark.parametrize(("content", "shown"), [(None, "Hm."), ("I look.", "")])
def test_reasoning_before_a_call_has_the_name_in_the_template_of_gpt_oss(content: str | None, shown: str) -> None:
    """The template refuses content and reasoning beside a call."""
    called = {**CALLED, "content": content, "reasoning_content": "Hm."}
    assert render("{{ messages[1].thinking }}", {"messages": [USER, called, RESULT]}) == shown


def test_ids_of_calls_have_the_form_that_the_template_accepts() -> None:
    """Other ids come from forced calls, `/v1/responses` and other servers."""
    call, result = {**CALL, "id": "call_1"}, {**RESULT, "tool_call_id": "call_1"}
    prompt = render(FILES["mistral"], {"messages": [USER, {**CALLED, "tool_calls": [CALL, call]}, RESULT, result]})
    first, second = re.findall(r'"id": "(\w{9})"', prompt)
    assert (first, re.findall(r'"call_id": "(\w+)"', prompt)) == (CALL["id"], [first, second])


def test_calls_have_the_form_in_which_the_template_shows_them() -> None:
    """DeepSeek's templates show calls of messages whose content is none, and join the text of their arguments."""
    text = (
        "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    prompt = render(text, {"messages": [USER, CALLED, RESULT]})
    assert prompt == ' Rain in Köln? get_weather{"city": "Köln", "days": [1, 2.5, null]}{"rain": true}'


def test_claude_codes_attribution_is_left_out() -> None:
    """Gateways pass it on."""
    line = "x-anthropic-billing-header: cch=1;"
    for given in (f"{line}\n{SYSTEM['content']}", parts(line, SYSTEM["content"]), parts(f"{line}\nBe", "brief.")):
        prompt = render(GEMMA, {"messages": [{"role": "system", "content": given}, USER]})
        assert prompt.replace("\n", " ") == f"user:{SYSTEM['content']}Rain in Köln?;"


def test_message_that_the_template_omits_cannot_be_continued() -> None:
    body = BODIES["continued"]
    with pytest.raises(APIError, match="does not show"):
        render("{{ messages[0].content }}", body)
    with pytest.raises(APIError, match="no content"):
        render(FILES["hermes"], {**body, "messages": [USER, CALLED]})


def test_template_for_tools_is_found_and_used(tmp_path: Path) -> None:
    variants = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": variants}))
    assert find_template(tmp_path, None, "tool_use") == "T"
    assert find_template(tmp_path, "own.jinja", "tool_use") is None
    (tmp_path / "tokenizer.json").symlink_to(DEMO_MODEL / "tokenizer.json")
    model = ServedModel.load(FrontendConfig(model=str(DEMO_MODEL), tokenizer=str(tmp_path)))
    bodies = (ChatRequest.model_validate(BODIES[name]) for name in ("tools", "no tools"))
    assert [model.template.render(conversation(body)) for body in bodies] == ["T", "D"]
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("F")
    assert find_template(tmp_path, None, "tool_use") == "F"
    assert [render("D", BODIES[name], "T") for name in ("tools", "no tools")] == ["T", "D"]
    assert render("D", BODIES["tools"]) == "D"


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False, "a": 1}},
            {"reasoning_effort": "high", "enable_thinking": False, "a": 1},
        ),
        ({}, {}),
    ],
)
def test_reasoning_effort_is_a_variable_of_the_template(fields: dict[str, Any], variables: dict[str, Any]) -> None:
    body = ChatRequest.model_validate({"messages": [USER], **fields})
    assert conversation(body).variables == variables
    if variables:
        template = chat_template("{{ reasoning_effort }} {{ enable_thinking }}", None)
        expected = f"{variables['reasoning_effort']} {variables['enable_thinking']}"
        assert template.render(conversation(body)) == expected
