"""Hostile requests: each gets an error of the 4xx class quickly, and the next request is served.

Small invalid values are in tests/integration/frontend/test_refusals.py, more grammars in
tests/unit/scheduler/grammar/test_bombs.py.
"""

import json
from typing import Any

import httpx
import pytest

from tests.e2e.server import ServeProcess

pytestmark = pytest.mark.usefixtures("unharmed")
SOON = 10.0
"""Seconds within which each request must be answered; a timeout fails the test."""
COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
MESSAGES = [{"role": "user", "content": "x"}]
WRONG: list[Any] = [True, -1, 1.5, "x", [], {}, [[]], [None], {"x": {}}, 2**70, -(2**70), "\x00", "x" * 70_000]


def body_of(path: str) -> dict[str, Any]:
    """Return a minimal body for the path."""
    if path == EMBEDDINGS:
        return {"input": "x"}
    return {"max_tokens": 2} | ({"prompt": "x"} if path == COMPLETIONS else {"messages": MESSAGES})


def send(server: ServeProcess, path: str, body: bytes | dict[str, Any]) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    # verify: loading certificates takes time and is not needed for http
    return httpx.post(server.url + path, content=content, timeout=SOON, verify=False)


def assert_refused(response: httpx.Response) -> None:
    """Check for an error body of OpenAI's form without internals of the server."""
    assert 400 <= response.status_code < 500, response.text[:500]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(error["message"]) < 2000
    for leak in ("Traceback", "0x", "/services/", "site-packages", ".py", "/usr/", "/tmp/", "pydantic", "llguidance"):
        assert leak not in response.text, response.text[:500]


def prompt_with(field: str, value: str) -> bytes:
    return b'{"prompt": "x", "%s": %s}' % (field.encode(), value.encode())


RAW = {
    "invalid UTF-8": b'{"prompt": "\xff\xfe\xfd"}',
    "overlong UTF-8": b'{"prompt": "\xc0\xaf"}',
    "UTF-8 of a surrogate": b'{"prompt": "\xed\xa0\x80"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "two byte order marks": b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "x"}',
    "lone high surrogate": b'{"prompt": "\\ud800"}',
    "lone low surrogate": b'{"prompt": "x", "stop": "\\udfff"}',
    "surrogate in a name": b'{"prompt": "x", "\\ud800": 1}',
    "deep lists": b"[" * 1_000_000,
    "deep objects": b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
    "deep lists in a field": b'{"prompt": "x", "logit_bias": ' + b"[" * 500_000 + b"]" * 500_000 + b"}",
    "deep lists in a schema": b'{"prompt": "x", "structured_outputs": {"json": '
    + b'{"items":' * 100_000 + b"{}" + b"}" * 100_000 + b"}}",
    "NaN": prompt_with("temperature", "NaN"),
    "Infinity": prompt_with("top_p", "Infinity"),
    "minus Infinity": prompt_with("presence_penalty", "-Infinity"),
    "1e400": prompt_with("temperature", "1e400"),
    "1e400 in logit_bias": prompt_with("logit_bias", '{"1": 1e400}'),
    "NaN in logit_bias": prompt_with("logit_bias", '{"1": NaN}'),
    "a million digits": prompt_with("seed", "9" * 1_000_000),
    "a million digits after the point": prompt_with("top_p", "0." + "9" * 1_000_000 + "e999999999"),
    "giant exponent as integer": prompt_with("max_tokens", "1e308"),
    "giant integer as token": b'{"prompt": [99999999999999999999999999]}',
    "cut short": b'{"prompt": "x", "stop": ["a", ',
    "two bodies": b'{"prompt": "x"}{"prompt": "x"}',
    "no bytes": b"",
    "an open brace": b"{",
    "a list": b"[]",
    "null": b"null",
    "a text": b'"text"',
    "an empty object": b"{}",
    "a field twice": b'{"prompt": "x", "prompt": 5}',
    "NUL": b"\x00" * 1000,
    "a hundred thousand unknown fields": b"{" + b",".join(b'"f%d":1' % i for i in range(100_000)) + b"}",
}  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, EMBEDDINGS])
def test_invalid_body_is_refused(sim: ServeProcess, path: str) -> None:
    for name, body in RAW.items():
        try:
            assert_refused(send(sim, path, body))
        except httpx.TimeoutException:
            pytest.fail(f"no answer in time: {name}")


OUT_OF_RANGE: list[tuple[str, dict[str, Any], str | None]] = [
    (COMPLETIONS, {"n": 2**31}, "n"),
    (CHAT, {"n": 10**9}, "n"),
    (COMPLETIONS, {"prompt": [1] * 1_000_000}, "prompt"),
    (COMPLETIONS, {"prompt": "x" * 3_900_000}, "prompt"),
    (COMPLETIONS, {"prompt": [[1]] * 10_000}, "prompt"),
    (COMPLETIONS, {"prompt": [None] * 1_000_000}, "prompt"),
    (COMPLETIONS, {"prompt": [[-1]] * 1_000_000}, "prompt"),
    (CHAT, {"messages": [{}] * 1_000_000}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}] * 1000}] * 150}, "messages"),
    (COMPLETIONS, {"logit_bias": {str(i): "x" for i in range(300_000)}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {str(i): 1.0 for i in range(100_000)}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"9" * 10_000: 1}}, "logit_bias"),
    (COMPLETIONS, {"stop": ["x"] * 100_000}, "stop"),
    (COMPLETIONS, {"stop": "x" * 1_000_000}, "stop"),
    (COMPLETIONS, {"stop_token_ids": [1] * 1_000_000}, "stop_token_ids"),
    (COMPLETIONS, {"bad_words": ["x"] * 100_000}, "bad_words"),
    (COMPLETIONS, {"bad_words": ["x" * 1_000_000]}, "bad_words"),
    (COMPLETIONS, {"allowed_token_ids": [1] * 1_000_000}, "allowed_token_ids"),
    (COMPLETIONS, {"cache_salt": "x" * 1_000_000}, "cache_salt"),
    (COMPLETIONS, {"user": "x" * 1_000_000}, "user"),
    (CHAT, {"messages": MESSAGES * 5000}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 2000}]}, "messages"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}] * 1000}, "tools"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f" * 1000}}]}, "tools"),
    (CHAT, {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}, "chat_template"),
    (CHAT, {"chat_template_kwargs": {str(i): i for i in range(1000)}}, "chat_template_kwargs"),
    (EMBEDDINGS, {"input": ["x"] * 100_000}, "input"),
    (EMBEDDINGS, {"dimensions": 2**31 - 1}, "dimensions"),
    (EMBEDDINGS, {"input": [1] * 1_000_000}, "input"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "more", "param"), OUT_OF_RANGE, ids=[f"{i}-{row[2]}" for i, row in enumerate(OUT_OF_RANGE)]
)
def test_value_out_of_range_is_refused_with_its_parameter(
    sim: ServeProcess, path: str, more: dict[str, Any], param: str | None
) -> None:
    response = send(sim, path, {**body_of(path), **more})
    assert_refused(response)
    assert response.json()["error"]["param"] == param


def test_integers_beyond_64_bits_in_passed_on_json_are_no_server_error(sim: ServeProcess) -> None:
    huge = -(2**64)
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "minimum": huge}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    for body in (
        {"messages": MESSAGES, "tools": [tool], "tool_choice": "required"},
        {
            "messages": MESSAGES,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": parameters}},
        },
    ):
        assert send(sim, CHAT, {**body, "max_tokens": 2}).status_code < 500
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": huge}}
    messages = [*MESSAGES, {"role": "assistant", "content": [use]}, *MESSAGES]
    assert send(sim, "/v1/messages", {"messages": messages, "max_tokens": 2}).status_code == 200
    tool = {"type": "function", "name": "f", "parameters": parameters}
    echoed = {"input": "x", "metadata": {"a": huge}, "tools": [tool], "tool_choice": "none"}
    assert send(sim, "/v1/responses", {**echoed, "max_output_tokens": 2}).status_code == 200


def test_wrong_types_in_every_field(sim: ServeProcess) -> None:
    """Each value is either allowed (such as a text for a list of texts) and answered, or refused. Fields that are
    declared alike on several paths are sent to one of them; of fields that differ in their name alone, which are
    those that are not supported, the first one has all values."""
    schemas = httpx.get(f"{sim.url}/openapi.json", timeout=SOON).json()["components"]["schemas"]
    names = {COMPLETIONS: "CompletionRequest", CHAT: "ChatRequest", EMBEDDINGS: "EmbeddingRequest"}
    seen: list[Any] = []
    refused = sent = 0
    with httpx.Client(timeout=SOON) as client:
        for path, name in names.items():
            for field in schemas[name]["properties"].items():
                if field in seen:
                    continue
                values = WRONG[:1] if any(field[1] == kind for _, kind in seen) else WRONG
                seen.append(field)
                sent += len(values)
                for value in values:
                    response = client.post(sim.url + path, content=json.dumps({**body_of(path), field[0]: value}))
                    if response.status_code != 200:
                        assert_refused(response)
                        error = response.json()["error"]
                        assert error["param"] == field[0] or field[0] in response.text, (field[0], value)
                        refused += 1
    assert refused > 0.7 * sent


TREE = {
    "$defs": {"t": {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}},
    "$ref": "#/$defs/t",
}
DEEP: dict[str, Any] = {}
for _ in range(200):
    DEEP = {"type": "array", "items": DEEP}
GRAMMARS: dict[str, dict[str, Any]] = {
    "counted repetition of counted repetition": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "a long regex": {"regex": "(ab?c*|d+){1,30}" * 15_000},
    "look-behind": {"regex": "(?<=a)b"},
    "back reference": {"regex": r"(a)\1"},
    "control characters as grammar": {"grammar": "\x00\x01"},
    "a million repetitions": {"grammar": 'start: "a"~1000000'},
    "a schema that is only recursive": {"json": {"$ref": "#"}},
    "a deep schema": {"json": DEEP},
    "a regex bomb in a schema": {"json": {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}},
    "invalid JSON": {"json": "{"},
    "a long choice": {"choice": ["x" * 100_000]},
    "a structural tag with invalid JSON": {"structural_tag": "{"},
}  # fmt: skip


def structured(more: dict[str, Any], **body: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 40, "structured_outputs": more, **body}


def test_harmless_grammars_are_served(sim: ServeProcess) -> None:
    """Otherwise the next test would prove nothing. A recursive schema with a finite match is harmless."""
    for more in ({"regex": "[0-9]{3}"}, {"json": TREE}, {"choice": ["yes", "no"]}):
        assert send(sim, COMPLETIONS, structured(more)).status_code == 200


@pytest.mark.parametrize("name", GRAMMARS)
def test_expensive_or_invalid_grammar_is_refused(sim: ServeProcess, name: str) -> None:
    for stream in (False, True):
        assert_refused(send(sim, COMPLETIONS, structured(GRAMMARS[name], stream=stream)))


def test_grammar_with_many_states_is_answered(sim: ServeProcess) -> None:
    """It may be served or refused, but must not delay the server."""
    response = send(sim, COMPLETIONS, structured({"regex": "(a|b)*a(a|b){1,5000}"}))
    if response.status_code != 200:
        assert_refused(response)


@pytest.mark.parametrize("name", ["a schema that is only recursive", "a deep schema", "a regex bomb in a schema"])
def test_bad_schema_is_refused_as_response_format_and_as_tool(sim: ServeProcess, name: str) -> None:
    schema = GRAMMARS[name]["json"]
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert_refused(send(sim, CHAT, {**body_of(CHAT), "response_format": format}))
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert_refused(send(sim, CHAT, {**body_of(CHAT), "tools": [tool], "tool_choice": "required"}))
