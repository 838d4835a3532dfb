"""Tool calls in the models' formats: results do not depend on how the text is cut, and no text is lost."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.openai.answers.chat_output import AnswerParser, ChatOutput
from services.frontend.openai.schemas.requests import ChatRequest
from services.frontend.output_formats import TOOL_FORMATS as FORMATS
from services.frontend.output_formats import OutputFormats
from services.frontend.parsing.events import Arguments, CallStart, Content, ParsedEvent, Reasoning
from services.frontend.parsing.python_reader import literal_json
from services.frontend.parsing.text_buffer import ParseError
from services.frontend.tools.json_calls import NamedParser, RequiredParser
from services.frontend.tools.parser import MAX_HELD, ToolParser
from services.frontend.tools.values import value_json

NAMES = frozenset({"f", "get_weather"})
ONE = '{"name": "f", "arguments": {"a": [1, "x}]\\"", {"b": null}], "é": -1.5e3}}'
ONE_ARGUMENTS = '{"a": [1, "x}]\\"", {"b": null}], "é": -1.5e3}'
TWO = '{"name": "get_weather", "parameters": {"city": "Rom"}}'
TWO_ARGUMENTS = '{"city": "Rom"}'
BOTH = [("f", ONE_ARGUMENTS), ("get_weather", TWO_ARGUMENTS)]

DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    + ONE_ARGUMENTS
    + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    + TWO_ARGUMENTS
    + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
VALUES = [
    ("city", "Rom <b>\nor 7"), ("zip", "00100"), ("days", "3"), ("fine", "True"), ("more", '{"a": [1, null]}'),
    ("list", "['x', (1,)]"), ("odd", "not json"), ("any", "2.5"), ("nothing", "null"), ("named", "7"),
    ("either", "True"), ("count", "7"), ("part", "2.5"),
]  # fmt: skip
"""Arguments as these formats write them, without their types."""
TYPES = {
    "city": {"type": "string"}, "zip": {"enum": ["00100", "7"]}, "days": {"type": "integer"},
    "fine": {"type": "boolean"}, "more": {"type": "object"}, "list": {"type": "array"}, "odd": {"type": "number"},
    "nothing": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "named": {"allOf": [{"$ref": "#/$defs/name"}]},
    "either": {"type": ["string", "number"]}, "count": {"oneOf": [{"$ref": "#/$defs/name"}, {"type": "number"}]},
    "part": {"type": ["string", "integer"]},
}  # fmt: skip
TYPED = [
    (
        "get_weather",
        '{"city": "Rom <b>\\nor 7", "zip": "00100", "days": 3, "fine": true, "more": {"a": [1, null]}, '
        '"list": ["x", [1]], "odd": "not json", "any": 2.5, "nothing": null, "named": "7", "either": "True", '
        '"count": 7, "part": "2.5"}',
    )
]
FEW = [("get_weather", '{"city": "Rom <b>\\nor 7", "zip": "00100", "days": 3}')]


def qwen3(values: list[tuple[str, str]]) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    return f"<tool_call>\n<function=get_weather>\n{written}</function>\n</tool_call>"


def glm(values: list[tuple[str, str]]) -> str:
    written = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values)
    return f"<tool_call>get_weather\n{written}</tool_call>"


PYTHONIC = (
    "[get_weather(city='it\\'s \\u00e9', n=-3, big=1_000, x=.5, y=True, z=None, l=[1, {'a': (2,)}, []], d={},), "
    'f(s="a\\nb\\"")]'
)
LITERALS = [
    (
        "get_weather",
        '{"city": "it\'s é", "n": -3, "big": 1000, "x": 0.5, "y": true, "z": null, "l": [1, {"a": [2]}, []], "d": {}}',
    ),
    ("f", '{"s": "a\\nb\\""}'),
]
HARMONY = (
    "<|channel|>analysis<|message|>Think < hard.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.get_weather <|constrain|>json<|message|>{TWO_ARGUMENTS}<|call|>"
    "<|start|>assistant<|channel|>final<|message|>The answer.<|return|>"
)
Found = tuple[str, list[tuple[str, str]]]


def events(kind: type[ToolParser], chunks: list[str], eager: bool = True, **more: Any) -> list[ParsedEvent]:
    parameters = {"get_weather": {"properties": TYPES, "$defs": {"name": {"type": "string"}}}}
    parser = kind(more.pop("names", NAMES), eager, parameters=parameters, **more)
    return [event for chunk in chunks for event in parser.push(chunk)] + parser.push("", is_last=True)


def joined(found: list[ParsedEvent]) -> Found:
    """Return the content, and name and arguments of each call. Checks the order of events."""
    content, calls = "", []
    for event in found:
        match event:
            case Content(text):
                assert text
                content += text
            case CallStart(index, id, name):
                assert index == len(calls)
                assert id
                calls.append((name, ""))
            case Arguments(index, text):
                assert index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
            case Reasoning(text):
                assert text
    return content, calls


def read(kind: type[ToolParser], text: str, eager: bool = True, **more: Any) -> Found:
    return joined(events(kind, [text], eager, **more))


WHOLE: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", "", BOTH[:1]),
    ("hermes", f"Let me see.\n<tool_call>{ONE}</tool_call>\n<tool_call>{TWO}</tool_call>", "Let me see.", BOTH),
    ("hermes", f"<tool_call>{ONE}</tool_call> and <b>then</b>\n", "and <b>then</b>", BOTH[:1]),
    ("hermes", f"a\n<tool_call>{ONE}</tool_call>\nb", "a\n\nb", BOTH[:1]),
    ("hermes", f"<tool_call>{ONE}", "", BOTH[:1]),
    ("hermes", f"<tool_call>{ONE}<tool_call>{TWO}", "", BOTH),
    ("hermes", f"<tool_call>{ONE}}}</tool_call>", "}</tool_call>", BOTH[:1]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"id": 7, "x": [{}, []], "name": "f", "arguments": {}, "y": true}', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "not-on-offer", "arguments": {}}', "", [("not-on-offer", "{}")]),
    (
        "hermes", r'<tool_call>{"name": "f", "arguments": {"a": "\ud83d\ude00\ud83dx\\ud800\udc00\ud83d\u00e9"}}', "",
        [("f", r'{"a": "\ud83d\ude00\ufffdx\\ud800\ufffd\ufffd\u00e9"}')],
    ),
    ("llama3_json", TWO, "", BOTH[1:]),
    ("llama3_json", f"\n {ONE} ; {TWO}\n", "", BOTH),
    ("llama3_json", f"<|python_tag|>{TWO}", "", BOTH[1:]),
    ("llama3_json", f"I will.<|python_tag|>{ONE};{TWO}", "I will.", BOTH),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("llama3_json", f"{ONE}\n{TWO} done", "done", BOTH),
    ("mistral", f"[TOOL_CALLS][{ONE}, {TWO}]", "", BOTH),
    ("mistral", f"[TOOL_CALLS] [ {ONE} ]\n", "", BOTH[:1]),
    ("mistral", f"Well [1] [TOOL_CALLS]{ONE}", "Well [1]", BOTH[:1]),
    ("mistral", f"[TOOL_CALLS]f{ONE_ARGUMENTS}[TOOL_CALLS]get_weather{TWO_ARGUMENTS}", "", BOTH),
    ("mistral", f"[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{ONE_ARGUMENTS}", "", BOTH[:1]),
    ("phi4_mini_json", f"functools[{ONE}, {TWO}]", "", BOTH),
    ("phi4_mini_json", f"I use functools: functools [{TWO}]", "I use functools:", BOTH[1:]),
    ("granite", f"<|tool_call|>[{ONE}, {TWO}]", "", BOTH),
    ("granite", f"Sure. <tool_call> [{TWO}]\n", "Sure.", BOTH[1:]),
    ("granite", f"[{ONE}]", "", BOTH[:1]),
    ("deepseek_v3", f"On it.{DEEPSEEK}", "On it.", BOTH),
    ("qwen3_xml", qwen3(VALUES), "", TYPED),
    ("qwen3_xml", f"Let me.\n{qwen3(VALUES[:3])}\n{qwen3(VALUES[:3])}", "Let me.", FEW * 2),
    ("qwen3_xml", qwen3(VALUES[:3]).removeprefix("<tool_call>\n"), "", FEW),
    ("qwen3_xml", "<tool_call><function=f></function></tool_call>", "", [("f", "{}")]),
    (
        "qwen3_xml", "<function=f>\n<parameter=a>\nx <parameter=\n<parameter=b>\n1\n</function>\n</tool_call>", "",
        [("f", '{"a": "x <parameter=", "b": 1}')],
    ),
    (
        "qwen3_xml", "<function=f><parameter=a>\n  x\n\n</parameter>\n</function>", "", [("f", '{"a": "  x\\n"}')],
    ),
    ("glm45", glm(VALUES), "", TYPED),
    ("glm45", f"Now{glm(VALUES[:3])}\n{glm(VALUES[:3])}", "Now", FEW * 2),
    ("glm45", "<tool_call>f</tool_call>", "", [("f", "{}")]),
    ("llama4_pythonic", PYTHONIC, "", LITERALS),
    ("llama4_pythonic", f"I call <|python_start|>{PYTHONIC}<|python_end|>", "I call", LITERALS),
    ("llama4_pythonic", "[f()]", "", [("f", "{}")]),
    ("openai", HARMONY, "The answer.", [("get_weather", TWO_ARGUMENTS)]),
    ("openai", "<|channel|>final<|message|>Hi <b>", "Hi <b>", []),
    ("openai", f"<|channel|>commentary to=get_weather json<|message|>{TWO_ARGUMENTS}<|call|>", "", BOTH[1:]),
    ("openai", '<|channel|>commentary to=python<|message|>{"a": 1}<|call|>', '{"a": 1}', []),
    (
        "openai",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{TWO_ARGUMENTS}<|call|>",
        "",
        BOTH[1:],
    ),
]  # fmt: skip


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("name", "text", "content", "calls"), WHOLE)
def test_calls_are_found_in_the_format(
    name: str, text: str, content: str, calls: list[tuple[str, str]], eager: bool
) -> None:
    assert read(FORMATS[name], text, eager) == (content, calls)
    assert joined(events(FORMATS[name], list(text), eager)) == (content, calls)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


NO_CALLS: list[tuple[str, str]] = [
    ("hermes", "Just <b>text</b> with a < and <tool_calls> and <tool_cal"),
    ("hermes", " leading and trailing \n\n"),
    ("hermes", "<tool_call>no json</tool_call>"),
    ("hermes", "<tool_call>{}</tool_call>"),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{} {}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f g", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>[" + ONE + "]</tool_call>"),
    ("hermes", "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>"),
    ("llama3_json", '{"name": "Bob", "parameters": {"age": 3}}'),
    ("llama3_json", '{"city": "Rom", "name": "f", "parameters": {}}'),
    ("llama3_json", '{"name": "f"}'),
    ("llama3_json", f"The call is {TWO}"),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("llama3_json", ""),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS]f"),
    ("mistral", "[TOOL_CALLS]f[X]{}"),
    ("mistral", "[TOOL_CALL] [INST]"),
    ("mistral", "[TOOL_CALLS]"),
    ("phi4_mini_json", "from functools import cache; functools[cache"),
    ("granite", '[{"name": "Bob", "arguments": {}}]'),
    ("granite", "[1, 2] and <tool_call>nothing"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>none"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```python\n{}"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f g\n```json\n{}"),
    ("qwen3_xml", "<tool_call>\n<function=f g></function>"),
    ("qwen3_xml", "a <function> of x"),
    ("qwen3_xml", "<function=f"),
    ("qwen3_xml", f"<function={'f' * 200}></function>"),
    ("glm45", "<tool_call>f g</tool_call>"),
    ("glm45", "<tool_call>f<arg_kex>"),
    ("llama4_pythonic", "[1, 2, 3]"),
    ("llama4_pythonic", "[unknown(a=1)]"),
    ("llama4_pythonic", "<|python_start|>print('x')<|python_end|>"),
    ("llama4_pythonic", "f(a=1)"),
    ("openai", "no marks at < all"),
    ("openai", "to be"),
]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_text_that_is_no_call_is_unchanged_content(name: str, text: str, eager: bool) -> None:
    assert read(FORMATS[name], text, eager) == (text, [])
    assert joined(events(FORMATS[name], list(text), eager)) == (text, [])


@pytest.mark.parametrize("broken", ['{"name": "f", "arguments": {"a": tru', '{"name": "f", "arguments": {"a": 01}}',
                                    '{"name": "f", "arguments": {"a" 1}}', '{"name": "f", "arguments": {"a": "\n"}}',
                                    '{"name": "f", "arguments": {}'])  # fmt: skip
def test_call_that_breaks_after_its_name_is_content_of_a_whole_answer_and_partly_returned_in_a_stream(
    broken: str,
) -> None:
    text = f"x <tool_call>{broken} y"
    assert read(FORMATS["hermes"], text, eager=False) == (text, [])
    content, ((name, arguments),) = read(FORMATS["hermes"], text)
    assert name == "f"
    assert broken.endswith(arguments + content.removeprefix("x").rstrip("y ").lstrip()) or arguments in broken
    assert read(FORMATS["hermes"], f"{text} <tool_call>{TWO}")[1][1:] == BOTH[1:]
    parser = FORMATS["hermes"](NAMES, True)
    parser.push(text)
    parser.push("", is_last=True)
    assert parser.num_calls == 0


def test_complete_calls_remain_when_a_later_one_breaks() -> None:
    assert read(FORMATS["mistral"], f"[TOOL_CALLS][{ONE}, oops]", eager=False) == (", oops]", BOTH[:1])
    text = f'<tool_call>{ONE}</tool_call><tool_call>{{"name": "f", "arg'
    assert read(FORMATS["hermes"], text, eager=False) == ('<tool_call>{"name": "f", "arg', BOTH[:1])


def test_arguments_are_returned_as_they_arrive() -> None:
    chunks = ["<tool_call>", '{"name": "f"', ', "arguments": {', '"a": ', "1", "}", "}", "</tool_call>"]
    parser = FORMATS["hermes"](NAMES, True)
    returned = [parser.push(chunk) for chunk in chunks]
    assert [len(each) for each in returned] == [0, 0, 2, 1, 1, 1, 0, 0]
    assert returned[3] == [Arguments(0, '"a": ')]


def test_parser_of_whole_answers_returns_only_complete_calls() -> None:
    parser = FORMATS["hermes"](NAMES, False)
    assert parser.push('<tool_call>{"name": "f", "arguments": {"a": 1}') == []
    assert joined(parser.push("}")) == ("", [("f", '{"a": 1}')])


@pytest.mark.parametrize("eager", [False, True])
def test_calls_beyond_max_calls_are_dropped(eager: bool) -> None:
    text = f"<tool_call>{ONE}</tool_call>\n<tool_call>{TWO}</tool_call>"
    assert read(FORMATS["hermes"], text, eager, max_calls=1) == ("", BOTH[:1])


def test_ids_differ_and_those_of_mistral_have_the_form_that_its_templates_accept() -> None:
    starts = [e for e in events(FORMATS["mistral"], [f"[TOOL_CALLS][{ONE},{TWO}]"]) if isinstance(e, CallStart)]
    assert starts[0].id != starts[1].id
    assert all(len(start.id) == 9 and start.id.isalnum() for start in starts)


def test_required_calls_are_parsed_from_the_json_of_the_grammar() -> None:
    assert read(RequiredParser, f"[{ONE}, {TWO}]") == ("", BOTH)
    assert read(NamedParser, f" {TWO_ARGUMENTS}", names=frozenset({"f"})) == ("", [("f", TWO_ARGUMENTS)])


@pytest.mark.parametrize("eager", [False, True])
def test_a_required_call_that_is_cut_off_is_no_content(eager: bool) -> None:
    whole = f"[{ONE}, {TWO}]"
    for end in range(len(whole)):
        begun = [(name, arguments) for name, arguments in BOTH if f'{name}", ' in whole[:end]]
        content, calls = read(RequiredParser, whole[:end], eager)
        assert (content, [name for name, _ in calls]) == ("", [name for name, _ in begun][: len(calls)])
        assert len(begun) - len(calls) <= 1, "the arguments of the last one have not begun"
        assert all(b[1].startswith(c[1]) for b, c in zip(begun, calls, strict=False))
    assert read(NamedParser, '{"city": "R', eager, names=frozenset({"f"})) == ("", [("f", '{"city": "R')])
    assert read(RequiredParser, "[I cannot]", eager) == ("[I cannot]", []), "no grammar wrote it"


UNTAGGED = [kind for name, kind in FORMATS.items() if name != "openai"]
"""Formats without marks around all text."""
FRAGMENTS = st.sampled_from([
    "functools", "<|tool_call|>", "<function=f>", "<parameter=a>", "</parameter>", "</function>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>", "```json", "```", "<｜tool▁call▁end｜>", "<|channel|>", "<|message|>", "<|start|>",
    "<|end|>", "<|call|>", "analysis", " to=functions.f", "<|python_start|>", "f(", "a=", "'x'", ")", "(1,)",
    "True", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "[CALL_ID]", ONE, TWO,
    ONE[:20], TWO[:40], "[", "]", "{", "}", ",", ";", " ", "\n", "f", '"name"', ":", '"arguments"',
    '"parameters"', '"f"', '"', "\\", "<", "text", "\\ud83d", "1e5", "-", "null", "é",
])  # fmt: skip
KINDS = st.sampled_from([*FORMATS.values(), RequiredParser])


@given(KINDS, st.lists(FRAGMENTS, max_size=12).map("".join), st.booleans(), st.data())
def test_result_does_not_depend_on_the_cuts(
    kind: type[ToolParser], text: str, eager: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8), "cuts"))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert joined(events(kind, chunks, eager)) == joined(events(kind, list(text), eager)) == read(kind, text, eager)


@pytest.mark.parametrize(("name", "text", "content", "calls"), WHOLE)
def test_every_cut_in_two_gives_the_same_result(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    """In a stream; a whole answer is read by the same steps and holds back what they return."""
    for cut in range(1, len(text)):
        assert joined(events(FORMATS[name], [text[:cut], text[cut:]])) == (content, calls)


def test_reasoning_of_gpt_oss_is_that_of_the_channel_analysis() -> None:
    found = events(FORMATS["openai"], list(HARMONY))
    assert "".join(event.text for event in found if isinstance(event, Reasoning)) == "Think < hard."


@pytest.mark.parametrize("eager", [False, True])
def test_gpt_oss_makes_no_calls_without_a_choice_of_tools(eager: bool) -> None:
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}], "tool_choice": "none"})
    output = ChatOutput.from_body(body, OutputFormats(FORMATS["openai"]))
    for text in (HARMONY, HARMONY.replace("}<|call|>", "<|call|>"), HARMONY.replace("Rom", "<" * MAX_HELD)):
        parser = AnswerParser(output, eager)
        assert joined(parser.push(text, is_last=True)) == ("The answer.", [])
        assert parser.num_calls == 0  # else finish_reason is tool_calls


@pytest.mark.parametrize(
    ("text", "json_text"),
    [
        ("-.5e3", "-500.0"),
        ("+7", "7"),
        ("1.", "1.0"),
        ("'\\ud83d\\ude00\\x41\\q'", '"😀A\\\\q"'),
        ("[[], {}, ()]", "[[], {}, []]"),
    ],
)
def test_python_literals_as_json(text: str, json_text: str) -> None:
    assert literal_json(text) == json_text


@pytest.mark.parametrize("text", ["007", ".", "1 2", "{1: 2}", "[1", "'a\nb'", "print", "{'a' 1}", "[" * 1000])
def test_text_that_is_no_python_literal(text: str) -> None:
    with pytest.raises(ParseError):
        literal_json(text)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.integers(-(10**18), 10**18) | st.floats(allow_nan=False, allow_infinity=False)
PYTHON_VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(PYTHON_VALUES)
def test_every_python_literal_becomes_its_json(value: object) -> None:
    assert json.loads(literal_json(repr(value))) == value


@given(st.sampled_from(UNTAGGED), st.lists(FRAGMENTS, max_size=12).map("".join))
def test_no_text_is_lost_and_calls_are_complete(kind: type[ToolParser], text: str) -> None:
    content, calls = read(kind, text, eager=False)
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)
    if not calls:
        assert content == text
    assert "text" not in text or "text" in content or calls


def test_malicious_text_is_parsed_in_linear_time_and_bounded_memory() -> None:
    deep = '<tool_call>{"name": "f", "arguments": ' + "[" * 200_000
    assert read(FORMATS["hermes"], deep, eager=False) == (deep, [])
    nested = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 200_000
    assert read(FORMATS["hermes"], nested, eager=False) == (nested, [])
    for text in ("<" * 1_000, "<tool_call>" * 100, "<tool_call>{" * 100, " " * 1_000, "[TOOL_CALLS][{" * 100):
        for kind in FORMATS.values():
            assert joined(events(kind, list(text))) == read(kind, text) == (text, [])
            assert read(kind, text * 8) == (text * 8, [])
    held = '<tool_call>{"arguments": {"a": "' + "x" * MAX_HELD
    parser = FORMATS["hermes"](NAMES, True)
    assert sum(len(event.text) for event in parser.push(held) if isinstance(event, Content)) > MAX_HELD / 2


def test_a_schema_is_read_once_however_many_references_to_it_there_are() -> None:
    reads = Counter[str]()

    class Branch(dict[str, str]):
        def get(self, key: str, default: object = None) -> object:
            reads[key] += 1
            return super().get(key, default)

    references = [{"$ref": "#" + "/" * count} for count in range(3)]
    root = {"properties": {"a": {"anyOf": references}}, "anyOf": [Branch(type="string")]}
    assert (value_json("7", "a", root), reads["type"]) == ('"7"', 1)
