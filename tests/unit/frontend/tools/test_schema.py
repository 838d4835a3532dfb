"""The schemas of required calls accept the same arguments as the tools' own schemas."""

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.errors import APIError
from services.frontend.tools.schema import MAX_DEPTH, arguments_schema, calls_schema

CITY = {"type": ["object", "null"], "properties": {"city": {"type": "string"}}, "required": ["city"]}
TREE = {
    "type": "object",
    "properties": {
        "tree": {"$ref": "#/$defs/node"},
        "self": {"$ref": "#"},
        "$ref": {"type": "integer"},
        "named": {"$ref": "#leaf"},
    },
    "required": ["tree"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                "default": {"$ref": "#/definitions/leaf"},
            },
            "required": ["children"],
        }
    },
    "definitions": {"leaf": {"$anchor": "leaf", "const": {"$ref": "#"}}},
}
TOOLS: dict[str, dict[str, Any] | None] = {"weather": CITY, "grow": TREE, "now": None, "empty": {}}


def accepts(schema: dict[str, Any], value: object) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


ARGUMENTS = st.sampled_from(
    [
        {}, {"city": "Rom"}, {"city": 5}, {"tree": {"children": []}}, {"tree": {"children": [{"children": []}]}},
        {"tree": {"children": [{}]}}, {"tree": {"children": []}, "self": {"tree": 5}}, [], None, {"zone": 1},
        {"tree": {"children": []}, "self": {"tree": {"children": []}}}, {"tree": {"children": [], "default": {}}},
        {"tree": {"children": [], "default": {"$ref": "#"}}}, {"tree": {"children": []}, "$ref": 7},
        {"tree": {"children": []}, "$ref": "#"}, {"tree": {"children": []}, "named": {"$ref": "#"}},
        {"tree": {"children": []}, "named": {}},
    ]
)  # fmt: skip


@given(st.sampled_from(sorted(TOOLS)), ARGUMENTS)
def test_call_is_accepted_if_its_arguments_match_the_schema_of_the_tool(name: str, arguments: object) -> None:
    nothing = {"type": "object", "maxProperties": 0}
    fits = isinstance(arguments, dict) and accepts(TOOLS[name] or nothing, arguments)
    assert accepts(arguments_schema(TOOLS[name]), arguments) == fits
    assert accepts(calls_schema(TOOLS, None), [{"name": name, "parameters": arguments}]) == fits
    assert accepts(calls_schema({name: TOOLS[name]}, 1), [{"name": name, "parameters": arguments}]) == fits


def test_calls_are_limited_in_number_and_have_no_other_fields() -> None:
    call = {"name": "now", "parameters": {}}
    many, one = calls_schema(TOOLS, None), calls_schema(TOOLS, 1)
    assert accepts(many, [call, call])
    assert accepts(one, [call])
    assert not accepts(one, [call, call])
    for wrong in ([], call, [{**call, "name": "nobody"}], [{**call, "more": 1}], [{"name": "now"}]):
        assert not accepts(many, wrong)
    assert list(many["items"]["anyOf"][0]["properties"]) == ["name", "parameters"], "the order of writing"


def test_parameters_that_are_nested_too_deeply_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(MAX_DEPTH + 1):
        deep = {"not": deep}
    with pytest.raises(APIError, match="nested too deeply"):
        calls_schema({"f": deep}, None)
