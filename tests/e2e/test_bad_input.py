"""Bad input over the wire: an error body of OpenAI's shape, nothing else harmed, and the server serves on."""

import json
import socket

import httpx
import pytest

from tests.e2e.server import Server

COMPLETION = {"prompt": "Return", "max_tokens": 4, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}

BODIES = [
    b"", b"{", b"[]", b"null", b'"text"', b"{}", b"\xff\xfe{}", b'{"prompt": "\\ud800"}', b"[" * 100_000,
    b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": 1e999}', b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}",
    b'{"prompt": "x", "prompt": 5}', b'{"prompt": [[]]}', b'{"prompt": []}', b'{"prompt": [""]}', b'{"prompt": [1.5]}',
    b'{"prompt": [true]}', b'{"prompt": "x", "seed": "1"}', b'{"prompt": "x", "stop": [1]}',
    b'{"prompt": "x", "stream_options": {"include_usage": true}}',
]  # fmt: skip


def assert_error(response: httpx.Response, status: int) -> None:
    assert response.status_code == status, response.text[:300]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in response.text
    assert "0x" not in error["message"]


def assert_serves(server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json=COMPLETION, timeout=60)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_malformed_bodies_are_400_and_the_server_serves_on(server: Server, path: str) -> None:
    for body in BODIES:
        response = httpx.post(server.url + path, content=body, timeout=60)
        assert_error(response, 400)
    assert_serves(server)


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([], "messages"),
        ([{"role": "wizard", "content": "x"}], "role"),
        ([{"role": "tool", "content": "x"}], "role"),
        ([{"content": "x"}], "role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}], "content"),
        ([{"role": "user", "content": 5}], "content"),
        ("hello", "messages"),
        ([{"role": "user", "content": "word " * 5000}], "2048"),
    ],
)
def test_bad_messages_are_400_and_named(server: Server, messages: object, word: str) -> None:
    response = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": messages}, timeout=60)
    assert_error(response, 400)
    assert word in response.text


def test_ten_megabyte_body_is_413(server: Server) -> None:
    body = json.dumps({"prompt": "x" * 10_000_000}).encode()
    assert_error(httpx.post(f"{server.url}/v1/completions", content=body, timeout=60), 413)
    assert_serves(server)


def test_unknown_paths_and_methods_have_error_bodies(server: Server) -> None:
    assert_error(httpx.get(f"{server.url}/v1/nothing"), 404)
    assert_error(httpx.get(f"{server.url}/v1/completions"), 405)


def test_streaming_request_that_is_refused_keeps_its_status(server: Server) -> None:
    body = {"prompt": [1] * 5000, "stream": True}
    assert_error(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60), 400)


def test_huge_header_and_broken_http_close_only_their_connection(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for raw in (
        b"GET / HTTP/1.1\r\nx: " + b"y" * 1_000_000,
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            try:
                connection.sendall(raw)
                answer = connection.recv(65536)
            except ConnectionError:
                answer = b""
        assert not answer or answer.split()[1].startswith(b"4")
    assert_serves(server)
