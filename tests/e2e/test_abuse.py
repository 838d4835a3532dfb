"""What is sent to do harm gets an error of the client's own making, soon; the next request is served."""

import json
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server

SOON = 10.0
"""Seconds within which each of these is answered: the client gives up then, which fails the test."""
COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
MESSAGES = [{"role": "user", "content": "x"}]
WRONG: list[Any] = [
    True,
    -1,
    1.5,
    "x",
    [],
    {},
    [[]],
    [None],
    {"x": {}},
    2**70,
    -(2**70),
    "\x00",
    "x" * 70_000,
]


def body_of(path: str) -> dict[str, Any]:
    """The least that the path takes."""
    return {
        COMPLETIONS: {"prompt": "x", "max_tokens": 2},
        CHAT: {"messages": MESSAGES, "max_tokens": 2},
        EMBEDDINGS: {"input": "x"},
    }[path]


def send(server: Server, path: str, body: bytes | dict[str, Any]) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(
        server.url + path, content=content, timeout=SOON, verify=False
    )  # no time for certificates


def assert_refused(response: httpx.Response) -> str:
    """OpenAI's error body, and nothing in it of how this server is made; its message."""
    assert 400 <= response.status_code < 500, response.text[:500]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(error["message"]) < 2000
    for leak in (
        "Traceback",
        "0x",
        "/services/",
        "site-packages",
        ".py",
        "/usr/",
        "/tmp/",
        "pydantic",
        "llguidance",
    ):
        assert leak not in response.text, response.text[:500]
    return str(error["message"])


def assert_serves(server: Server) -> None:
    answer = send(server, COMPLETIONS, {"prompt": "x", "max_tokens": 4, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4


@pytest.fixture(autouse=True)
def _unharmed(sim: Server) -> Any:
    """No process of the server has ended, nothing of a refused request stays, and the next one is served."""
    before = {name: process.pid for name, process in sim.services.items()}
    yield
    assert_serves(sim)
    sim.find_services()
    assert {name: process.pid for name, process in sim.services.items()} == before
    assert sim.metric("num_requests_running") == sim.metric("num_requests_waiting") == 0


def prompt_with(field: str, value: str) -> bytes:
    return b'{"prompt": "x", "%s": %s}' % (field.encode(), value.encode())


RAW = {
    "invalid UTF-8": b'{"prompt": "\xff\xfe\xfd"}',
    "overlong UTF-8": b'{"prompt": "\xc0\xaf"}',
    "UTF-8 of a surrogate": b'{"prompt": "\xed\xa0\x80"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"prompt": "x"}',
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
    "nothing": b"",
    "NUL": b"\x00" * 1000,
    "a hundred thousand unknown fields": b"{" + b",".join(b'"f%d":1' % i for i in range(100_000)) + b"}",
}  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, EMBEDDINGS])
def test_bytes_that_are_no_body(sim: Server, path: str) -> None:
    for name, body in RAW.items():
        try:
            assert_refused(send(sim, path, body))
        except httpx.TimeoutException:
            pytest.fail(f"no answer to: {name}")


HUGE: list[tuple[str, dict[str, Any], str | None]] = [
    (COMPLETIONS, {"n": 2**31}, "n"),
    (COMPLETIONS, {"n": 17}, "n"),
    (CHAT, {"n": 10**9}, "n"),
    (COMPLETIONS, {"best_of": 10**9}, "best_of"),
    (COMPLETIONS, {"logprobs": 2**31}, "logprobs"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    (COMPLETIONS, {"prompt_logprobs": 10**6}, "prompt_logprobs"),
    (COMPLETIONS, {"max_tokens": 2**62}, "max_tokens"),
    (COMPLETIONS, {"min_tokens": 10**6}, "min_tokens"),
    (COMPLETIONS, {"prompt": [1] * 1_000_000}, "prompt"),
    (COMPLETIONS, {"prompt": "x" * 3_900_000}, "prompt"),
    (COMPLETIONS, {"prompt": [[1]] * 10_000}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 65}, "prompt"),
    (COMPLETIONS, {"prompt": [None] * 1_000_000}, "prompt"),
    (COMPLETIONS, {"prompt": [[-1]] * 1_000_000}, "prompt"),
    (CHAT, {"messages": [{}] * 1_000_000}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}] * 1000}] * 150}, "messages"),
    (COMPLETIONS, {"logit_bias": {str(i): "x" for i in range(300_000)}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {str(i): 1.0 for i in range(100_000)}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"99999999": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"1": 1e30}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"-1": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"9" * 10_000: 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"one": 1}}, "logit_bias"),
    (COMPLETIONS, {"stop": ["x"] * 100_000}, "stop"),
    (COMPLETIONS, {"stop": "x" * 1_000_000}, "stop"),
    (COMPLETIONS, {"stop_token_ids": [1] * 1_000_000}, "stop_token_ids"),
    (COMPLETIONS, {"stop_token_ids": [2**31 - 1]}, "stop_token_ids"),
    (COMPLETIONS, {"bad_words": ["x"] * 100_000}, "bad_words"),
    (COMPLETIONS, {"bad_words": ["x" * 1_000_000]}, "bad_words"),
    (COMPLETIONS, {"allowed_token_ids": [2**31 - 1]}, "allowed_token_ids"),
    (COMPLETIONS, {"allowed_token_ids": []}, "allowed_token_ids"),
    (COMPLETIONS, {"allowed_token_ids": [1] * 1_000_000}, "allowed_token_ids"),
    (COMPLETIONS, {"truncate_prompt_tokens": 2**31}, "truncate_prompt_tokens"),
    (COMPLETIONS, {"priority": 2**63}, "priority"),
    (COMPLETIONS, {"cache_salt": "x" * 1_000_000}, "cache_salt"),
    (COMPLETIONS, {"user": "x" * 1_000_000}, "user"),
    (COMPLETIONS, {"temperature": -0.1}, "temperature"),
    (COMPLETIONS, {"repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETIONS, {"logits_processors": ["os.system"]}, "logits_processors"),
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


@pytest.mark.parametrize(("path", "more", "param"), HUGE, ids=[f"{i}-{row[2]}" for i, row in enumerate(HUGE)])
def test_what_is_out_of_all_proportion(
    sim: Server, path: str, more: dict[str, Any], param: str | None
) -> None:
    response = send(sim, path, {**body_of(path), **more})
    assert_refused(response)
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, EMBEDDINGS])
def test_wrong_types_in_every_field(sim: Server, path: str) -> None:
    """What is no error (a text where texts are taken) must be an answer; nothing else may happen."""
    document = httpx.get(f"{sim.url}/openapi.json", timeout=SOON).json()
    name = {COMPLETIONS: "CompletionRequest", CHAT: "ChatRequest", EMBEDDINGS: "EmbeddingRequest"}[path]
    fields = document["components"]["schemas"][name]["properties"]
    refused = 0
    with httpx.Client(timeout=SOON) as client:
        for field in fields:
            for value in WRONG:
                body = {**body_of(path), field: value}
                response = client.post(sim.url + path, content=json.dumps(body))
                if response.status_code != 200:
                    assert_refused(response)
                    assert response.json()["error"]["param"] == field or field in response.text, (
                        field,
                        value,
                    )
                    refused += 1
    assert refused > 0.7 * len(fields) * len(WRONG)


TREE = {
    "$defs": {
        "t": {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}
    },
    "$ref": "#/$defs/t",
}
DEEP: dict[str, Any] = {}
for _ in range(200):
    DEEP = {"type": "array", "items": DEEP}
GRAMMARS: dict[str, dict[str, Any]] = {
    "counted repetition of counted repetition": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "30,000 parentheses": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "30,000 open parentheses": {"regex": "(" * 30_000},
    "a long regex": {"regex": "(ab?c*|d+){1,30}" * 15_000},
    "look-behind": {"regex": "(?<=a)b"},
    "back reference": {"regex": r"(a)\1"},
    "no regex": {"regex": "[z-a"},
    "parentheses in a grammar": {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "a grammar that is only itself": {"grammar": "start: start"},
    "a grammar of nothing known": {"grammar": "start: nothing"},
    "no grammar": {"grammar": "\x00\x01"},
    "a million repetitions": {"grammar": 'start: "a"~1000000'},
    "a schema that is only itself": {"json": {"$ref": "#"}},
    "a schema that must hold itself": {
        "json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    },
    "schemas that are one another": {
        "json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    },
    "a deep schema": {"json": DEEP},
    "a deep schema as text": {"json": '{"items":' * 20_000 + "{}" + "}" * 20_000},
    "a file": {"json": {"$ref": "file:///etc/passwd"}},
    "an address": {"json": {"$ref": "http://127.0.0.1:9/schema.json"}},
    "a regex bomb in a schema": {"json": {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}},
    "a billion items": {"json": {"type": "array", "items": {"type": "string"}, "minItems": 10**9}},
    "a billion characters": {"json": {"type": "string", "minLength": 10**9}},
    "a hundred thousand values": {"json": {"enum": list(range(30_000))}},
    "no schema": {"json": "{"},
    "no type": {"json": {"type": "wizard"}},
    "too many choices": {"choice": ["x"] * 5000},
    "a long choice": {"choice": ["x" * 100_000]},
    "no choice": {"choice": []},
    "two at once": {"regex": "a", "json": {}},
    "none": {},
    "a tag without an end": {"structural_tag": "{"},
}  # fmt: skip

DREADFUL: dict[str, dict[str, Any]] = {
    "states that double": {"regex": "(a|b)*a(a|b){1,5000}"},
}  # fmt: skip
"""What looks like it but is served as long as the request lasts."""


def structured(more: dict[str, Any], **body: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 40, "structured_outputs": more, **body}


def test_grammars_are_served_at_all(sim: Server) -> None:
    """Or the next test would prove nothing. A schema that may hold itself is none of the bombs."""
    for more in ({"regex": "[0-9]{3}"}, {"json": TREE}, {"choice": ["yes", "no"]}):
        assert send(sim, COMPLETIONS, structured(more)).status_code == 200


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars_that_cost_too_much_or_are_none(sim: Server, name: str) -> None:
    for stream in (False, True):
        assert_refused(send(sim, COMPLETIONS, structured(GRAMMARS[name], stream=stream)))


@pytest.mark.parametrize("name", DREADFUL)
def test_grammars_that_only_look_like_it(sim: Server, name: str) -> None:
    response = send(sim, COMPLETIONS, structured(DREADFUL[name]))
    if response.status_code != 200:
        assert_refused(response)


@pytest.mark.parametrize(
    "name", ["a schema that is only itself", "a deep schema", "a regex bomb in a schema"]
)
def test_the_same_as_response_format_and_as_a_tool(sim: Server, name: str) -> None:
    schema = GRAMMARS[name]["json"]
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert_refused(send(sim, CHAT, {**body_of(CHAT), "response_format": format}))
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert_refused(send(sim, CHAT, {**body_of(CHAT), "tools": [tool], "tool_choice": "required"}))
