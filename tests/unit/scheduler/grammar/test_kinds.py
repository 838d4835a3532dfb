"""Each kind of structured output, from the text of a request to the allowed tokens."""

import json
import random
from pathlib import Path

import jsonschema
import pytest

from protocol.sampling import GrammarKind
from services.scheduler.grammar.limits import MAX_WHITESPACE
from tests.unit.scheduler.grammar.support import CompilerClient, allowed, matches, random_output, text_of, tokens_of

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<tool=add>", "schema": TOOL, "end": "</tool>"}],
    "triggers": ["<tool="],
}
SPECIAL_TAG = {"structures": [{"begin": "<|user|>", "schema": TOOL, "end": "<|assistant|>"}], "triggers": ["<|user|>"]}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ADD = {"type": "tag", "begin": "<add>", "content": NUMBER, "end": "</add>"}
SHOUT = {"type": "tag", "begin": "<say>", "content": {"type": "any_text"}, "end": "</say>"}
FORMATS: list[tuple[dict[str, object], list[str], list[str]]] = [
    ({"type": "const_string", "value": 'a"\n'}, ['a"\n'], ["", "a"]),
    ({"type": "regex", "pattern": "[a-c]+/\\d"}, ["ab/7", "c/0"], ["ab7", "d/7"]),
    ({"type": "or", "elements": [NUMBER, ADD]}, ["7", "<add>-3</add>"], ["", "<add></add>", "7<add>3</add>"]),
    ({"type": "sequence", "elements": [ADD, {"type": "any_text"}]}, ["<add>1</add>", "<add>1</add> so"], ["so", ""]),
    (SHOUT, ["<say></say>", "<say>a < b</say>"], ["<say>", "<say>a</say> b", "say"]),
    ({**ADD, "end": ["</add>", "!"]}, ["<add>1</add>", "<add>1!"], ["<add>1", "<add>1?"]),
    (
        {"type": "triggered_tags", "triggers": ["<add", "<say>"], "tags": [ADD, SHOUT]},
        ["", "text", "a <add>1</add> b <say>x</say>"],
        ["<add>x", "<add"],
    ),
    (
        {
            "type": "triggered_tags",
            "triggers": ["<add>"],
            "tags": [ADD],
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["<add>1</add>", "so <add>1</add>"],
        ["", "so", "<add>1</add> so"],
    ),
    (
        {"type": "tags_with_separator", "tags": [ADD], "separator": ", "},
        ["", "<add>1</add>", "<add>1</add>, <add>2</add>"],
        ["<add>1</add>, ", "<add>1</add><add>2</add>"],
    ),
    (
        {
            "type": "tags_with_separator",
            "tags": [ADD],
            "separator": ";",
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["<add>1</add>"],
        ["", "<add>1</add>;<add>2</add>"],
    ),
]
GBNF = 'root ::= greeting " " name # a comment\ngreeting ::= "hello" | "bye"\nname ::= [a-z]+\n'
LARK = 'start: greeting " " NAME\ngreeting: "hello" | "bye"\nNAME: /[a-z]+/\n'


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        (GrammarKind.REGEX, "[a-f]{2}-[0-9]+", ["ab-1", "ff-987"], ["ab", "ab-", "ag-1", "ab-1 "]),
        (GrammarKind.CHOICE, '["a", "ab", "é\\n\\"x"]', ["a", "ab", 'é\n"x'], ["", "b", "aba", "é"]),
        (GrammarKind.GRAMMAR, LARK, ["hello bob", "bye x"], ["hello", "hello Bob", "hellobob"]),
        (GrammarKind.GRAMMAR, GBNF, ["hello bob", "bye x"], ["hello", "hello Bob", "hellobob"]),
        (GrammarKind.JSON_OBJECT, "", ["{}", '{"a": [1, null, {"b": "c"}]}'], ["[]", "1", '{"a"}', "{} x"]),
        (GrammarKind.JSON, "true", ["1", "[]", '"x"'], ["", "x", "[1,]"]),
        (GrammarKind.JSON, '{"type": "string", "pattern": "^a+$"}', ['"aa"'], ['"ab"', '""', "aa"]),
        (GrammarKind.JSON, '{"$ref": "#/$defs/a", "$defs": {"a": {"const": 7}}}', ["7"], ["8", '"7"']),
        (
            GrammarKind.JSON,
            json.dumps(PERSON),
            ['{"name":"Bo","age":3}', '{\n  "name": "Bo",\n  "age": 3,\n  "tags": ["a", "b"]\n}'],
            ['{"age":3,"name":"Bo"}', '{"name":"","age":3}', '{"name":"Bo","age":151}', '{"name":"Bo","age":3,"x":1}'],
        ),
        (
            GrammarKind.STRUCTURAL_TAG,
            json.dumps(TAG),
            ["", "plain text", 'so <tool=add>{"x":1}</tool> and <tool=add>{"x":22}</tool>.'],
            ["<tool=sub>", '<tool=add>{"y":1}</tool>', '<tool=add>{"x":1}</tool', "<tool=add>"],
        ),
        *(
            (GrammarKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": format}), good, bad)
            for format, good, bad in FORMATS
        ),
    ],
    ids=lambda value: value.name if isinstance(value, GrammarKind) else "",
)  # fmt: skip
def test_each_kind_matches_its_language_only(
    compiler: CompilerClient, kind: GrammarKind, text: str, good: list[str], bad: list[str]
) -> None:
    for answer in good:
        assert matches(compiler.grammar(kind, text), answer), answer
    for answer in bad:
        assert not matches(compiler.grammar(kind, text), answer), answer


def test_tag_with_a_special_token_as_trigger_matches_the_token(compiler: CompilerClient) -> None:
    grammar = compiler.grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(SPECIAL_TAG))
    user, assistant = 4, 5
    for token in (*tokens_of("see"), user, *tokens_of('{"x":1}')):
        assert token in allowed(grammar)
        assert grammar.accept(token)
    assert allowed(grammar) == {assistant}


def test_random_answers_to_a_schema_validate(compiler: CompilerClient) -> None:
    rng = random.Random(3)
    ended = 0
    for _ in range(40):
        output, complete = random_output(
            compiler.grammar(GrammarKind.JSON, json.dumps(PERSON)), iter(rng.random, None), 200
        )
        if complete:
            ended += 1
            jsonschema.validate(json.loads(text_of(output)), PERSON)
    assert ended > 20


def test_whitespace_is_bounded_between_parts_and_not_inside_of_strings(compiler: CompilerClient) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    blank = set(tokens_of("\n"))
    grammar = compiler.grammar(GrammarKind.JSON, json.dumps(schema))
    assert grammar.accept(tokens_of("{")[0])
    for _ in range(MAX_WHITESPACE):
        assert blank <= allowed(grammar)
        assert grammar.accept(*blank)
    assert allowed(grammar)
    assert all(text_of([token]).strip() for token in allowed(grammar))
    for token in tokens_of('"a":"'):
        assert grammar.accept(token)
    (space,) = tokens_of(" ")
    for _ in range(3 * MAX_WHITESPACE):
        assert space in allowed(grammar)
        assert grammar.accept(space)


def test_options_for_llguidance_in_a_schema_are_ignored(compiler: CompilerClient) -> None:
    schema = PERSON | {"x-guidance": {"item_separator": ";", "whitespace_flexible": 0, "lenient": True}}
    assert matches(compiler.grammar(GrammarKind.JSON, json.dumps(schema)), '{"name":"Bo", "age":3}')


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"whitespace_flexible": False}, '{"name":"Bo","age":3}'),
        ({"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}, '{"name": "Bo", "age": 3}'),
        ({"whitespace_pattern": " ?"}, '{ "name":"Bo" , "age": 3}'),
    ],
)
def test_schema_may_set_whitespace_and_separators(
    compiler: CompilerClient, options: dict[str, object], text: str
) -> None:
    grammar = compiler.grammar(GrammarKind.JSON, json.dumps(PERSON | {"x-guidance": options}))
    assert matches(grammar, text)
    grammar = compiler.grammar(GrammarKind.JSON, json.dumps(PERSON | {"x-guidance": options}))
    assert not matches(grammar, '{"name":\n"Bo","age":3}')


@pytest.mark.parametrize(
    ("kind", "text", "reasons"),
    [
        (GrammarKind.JSON, "{", "the JSON schema is not valid JSON"),
        (GrammarKind.JSON, '{"minimum": NaN}', "NaN is no JSON value"),
        (GrammarKind.JSON, "[]", "the JSON schema must be an object"),
        (GrammarKind.JSON, "false", "the JSON schema must be an object"),
        (GrammarKind.JSON, '{"type": "strange"}', "the JSON schema cannot be used"),
        (GrammarKind.JSON, '{"type": "string", "format": "strange"}', "Unknown format: strange"),
        (GrammarKind.JSON, '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
        (GrammarKind.JSON, '{"$ref": "http://127.0.0.1/schema"}', 'must begin with "#"'),
        (GrammarKind.JSON, '{"$ref": "file:///etc/passwd"}', 'must begin with "#"'),
        (GrammarKind.JSON, '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', "infinite size"),
        (GrammarKind.JSON, '{"type": "string", "enum": [1]}', "nothing|Unsatisfiable|cannot be used"),
        (GrammarKind.JSON, '{"type": "string", "minLength": 1000000000}', "minLength in the JSON schema is 1000000000"),
        (GrammarKind.JSON, '{"items": {"minProperties": 1e9}}', "1000000000.0; at most 1048576 can be served"),
        (GrammarKind.JSON, '{"type": "array", "minItems": 1048577}', "minItems in the JSON schema is 1048577"),
        (GrammarKind.REGEX, "[", "unclosed character class"),
        (GrammarKind.CHOICE, "[]", "between 1 and 5000 texts, got 0"),
        (GrammarKind.CHOICE, "[1]", "a list of texts"),
        (GrammarKind.GRAMMAR, "start: unknown", "unknown name"),
        (GrammarKind.GRAMMAR, "root ::= a b ::", "cannot be read as GBNF"),
        (GrammarKind.GRAMMAR, "", "the grammar cannot be used"),
        (GrammarKind.STRUCTURAL_TAG, "{}", 'needs lists of "structures" and "triggers"'),
        (GrammarKind.STRUCTURAL_TAG, '{"format": {}}', "has formats of the types const_string, "),
        (GrammarKind.STRUCTURAL_TAG, '{"format": {"type": "grammar", "grammar": "x"}}', "not 'grammar'"),
        (GrammarKind.STRUCTURAL_TAG, '{"format": {"type": "any_text", "excludes": ["a"]}}', '"excludes" of a'),
        (GrammarKind.STRUCTURAL_TAG, '{"format": {"type": "or", "elements": []}}', 'needs 1 to 128 "elements"'),
        (GrammarKind.STRUCTURAL_TAG, '{"format": {"type": "tag", "begin": "a"}}', 'each tag needs a text "begin"'),
        (GrammarKind.STRUCTURAL_TAG, '{"structures": [{}], "triggers": ["<"]}', 'needs texts "begin" and "end"'),
        (
            GrammarKind.STRUCTURAL_TAG,
            '{"structures": [{"begin": "<a>", "end": "", "schema": {}}], "triggers": ["["]}',
            "must begin with one of the triggers",
        ),
    ],
)  # fmt: skip
def test_refusal_is_one_line_without_internal_state(
    compiler: CompilerClient, kind: GrammarKind, text: str, reasons: str
) -> None:
    refusal = compiler.refusal(kind, text)
    assert any(part in refusal for part in reasons.split("|")), refusal
    assert "\n" not in refusal
    assert not any(word in refusal for word in (str(Path.cwd()), "site-packages", "0x", "<state>", "Traceback", ".rs"))
