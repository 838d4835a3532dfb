"""Clients that leave, stall, or send bytes that are not HTTP: their request ends, others are not affected."""

import contextlib
import json
import select
import signal
import socket
import struct
import time
from urllib.parse import urlsplit

import httpx
import pytest

from protocol.requests import GenerateRequest, RequestOutputs
from tests.integration.frontend.scripted import (
    SMALL_BUFFERS,
    Frontend,
    ScriptedScheduler,
    answering,
    ids_of,
    scripted,
    tokens,
    wait_until,
)
from tests.metrics import total


def connect(frontend: Frontend, buffer: int | None = None) -> socket.socket:
    address = urlsplit(frontend.url)
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(60)
    connection.connect((address.hostname, address.port))
    return connection


def post(
    connection: socket.socket, body: dict[str, object], path: str = "/v1/completions", more_headers: str = ""
) -> None:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{more_headers}Content-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def read_json(connection: socket.socket) -> bytes:
    """Read an answer whose body is a JSON object."""
    answer = b""
    while not answer.endswith(b"}"):
        part = connection.recv(100_000)
        assert part, "the connection was closed"
        answer += part
    return answer


def test_refusal_is_one_write(frontend: Frontend) -> None:
    """A client that is woken by the head would take the processor from the frontend before the body is sent."""
    with connect(frontend) as connection:
        for _ in range(20):
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: evil.example.com\r\n\r\n")
            answer = connection.recv(100_000)
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert answer.endswith(b"}")


def test_target_in_absolute_form_is_that_of_its_path(frontend: Frontend) -> None:
    with connect(frontend) as connection:
        connection.sendall(b"GET HTTP://localhost:8000/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_json(connection).startswith(b"HTTP/1.1 200")


def test_request_with_two_lengths_is_refused_and_nothing_behind_it_is_read(frontend: Frontend) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    with connect(frontend) as connection:
        connection.sendall(head + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + head)
        answer = read_all(connection)
    assert (answer[:13], answer.count(b"HTTP/1.1"), b"not both" in answer) == (b"HTTP/1.1 400 ", 1, True)


def test_client_that_leaves_while_it_sends_settings_is_no_bug() -> None:
    with scripted(enable_admin_routes=True) as (frontend, _):
        with connect(frontend) as connection:
            connection.sendall(b"POST /engines/replan HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        counted = {"handler": "/engines/replan", "status": "4xx"}
        page = f"{frontend.url}/metrics"
        wait_until(lambda: total(httpx.get(page).text, "http_requests_total", **counted) == 1, "it is counted")


def reset(connection: socket.socket) -> None:
    """Close with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["FIN", "RST"])
@pytest.mark.parametrize("started", [False, True])
def test_client_that_leaves_aborts_its_request(
    frontend: Frontend, scheduler: ScriptedScheduler, leave, stream: bool, started: bool
) -> None:
    before = frontend.metric("requests_total", outcome="aborted")
    if started:
        scheduler.script(lambda request: [tokens(request.number, ids_of("a few words"))])
    connection = connect(frontend)
    post(connection, {"prompt": ["x", "y"], "stream": stream})
    numbers = [scheduler.request(index).number for index in range(2)]
    if started and stream:
        assert b"200 OK" in connection.recv(100)
    leave(connection)
    for number in numbers:
        scheduler.wait_aborted(number)
    wait_until(lambda: frontend.metric("requests_total", outcome="aborted") == before + 1, "it is counted")


def test_client_that_does_not_read_is_aborted_and_others_are_served() -> None:
    ids = ids_of("a long word and another long word ") * 20

    def flood(request: GenerateRequest) -> list[RequestOutputs]:
        """Send to the first request more than all buffers hold."""
        if len(scheduler.requests) > 1:
            return answering("served")(request)
        return [tokens(request.number, ids, n * len(ids)) for n in range(200)]

    with scripted(SMALL_BUFFERS + "connection.STALL_SECONDS = 0.3\n") as (frontend, scheduler):
        scheduler.script(flood)
        with connect(frontend, buffer=4096) as stalled:
            post(stalled, {"prompt": "x", "stream": True})
            number = scheduler.request().number
            answer = frontend.post("/v1/completions", {"prompt": "y"}).json()
            assert answer["choices"][0]["text"] == "served"
            scheduler.wait_aborted(number)
            wait_until(lambda: frontend.metric("requests_total", outcome="aborted") == 1, "it is counted")
            wait_until(lambda: "the client did not read its response" in frontend.log, "it is logged")
        frontend.signal()
        assert frontend.wait() == 0, "the stalled connection does not delay the exit"


def test_client_that_sends_no_request_is_disconnected() -> None:
    patch = "from services.frontend.http import connection; connection.HEAD_SECONDS = 0.2"
    with scripted(patch) as (frontend, scheduler):
        for head in (b"", b"GET /livez HTTP/1.1\r\nHost:"):
            with connect(frontend) as connection:
                connection.sendall(head)
                assert read_all(connection) == b""
        scheduler.script(lambda request: [])
        with connect(frontend) as connection:  # a client that waits for its response is not disconnected
            post(connection, {"prompt": "x"})
            number = scheduler.request().number
            with connect(frontend) as silent:
                assert read_all(silent) == b"", "its time limit has passed, and so has that of the connection before"
            for output in answering("patience")(scheduler.request()):
                scheduler.send(output)
            answer = b""
            while b"patience" not in answer:
                part = connection.recv(10_000)
                assert part, "the connection was closed"
                answer += part
            assert number not in scheduler.aborted


def test_body_that_does_not_arrive_is_408() -> None:
    patch = "from services.frontend.openai.parameters import body; body.BODY_SECONDS = 0.2"
    with scripted(patch) as (frontend, _), connect(frontend) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        assert connection.recv(10_000).startswith(b"HTTP/1.1 408")


def test_endless_chunked_body_is_413(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    with connect(frontend) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            for _ in range(64):
                connection.sendall(chunk)
        except ConnectionError:
            pass  # refused before all chunks were sent
        with contextlib.suppress(ConnectionError):
            assert connection.recv(10_000).startswith(b"HTTP/1.1 413")
    assert frontend.ready()


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01\r\n\r\n",
        b"GET /nowhere HTTP/9.9\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"y" * 100_000,
    ],
)
def test_bytes_that_are_not_http_are_400_with_an_error_body(
    frontend: Frontend, scheduler: ScriptedScheduler, raw: bytes
) -> None:
    with connect(frontend) as connection:
        connection.sendall(raw)
        answer = read_all(connection)
    if not answer:
        return  # it was closed before all was sent
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 4")
    assert json.loads(body)["error"]["message"]


def test_requests_on_idle_connections_are_answered_although_the_event_loop_was_late() -> None:
    """The process is stopped while the idle time of its connections ends and new requests arrive on them."""
    patch = "from services.frontend import service; service.KEEP_ALIVE_SECONDS = 1"
    with scripted(patch) as (frontend, scheduler):
        scheduler.script(answering("served"))
        clients = [connect(frontend) for _ in range(50)]
        for client in clients:  # all at once, so that none has been idle for long
            post(client, {"prompt": "x"})
        for client in clients:
            read_json(client)
        frontend.signal(signal.SIGSTOP)
        ended, _, _ = select.select(clients, [], [], 0)  # their idle time was over before, on a busy machine
        for client in clients:
            post(client, {"prompt": "x"})
        time.sleep(1.2)  # nobody measures it: the idle time is over
        frontend.signal(signal.SIGCONT)
        for client in clients:
            with client:
                assert client in ended or b"served" in read_all(client), "it was reset without an answer"


def test_connections_beyond_the_limit_of_open_files_get_an_answer() -> None:
    """The limit is 128, and half of it is for connections."""
    patch = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))"
    with scripted(patch) as (frontend, scheduler):
        scheduler.script(answering("served"))
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(connect(frontend)) for _ in range(70)]
            answers = []
            for client in clients:  # one after another, as each refusal ends a connection and so makes room
                post(client, {"prompt": "x"})
                answers.append(read_json(client))
            assert {answer[:12] for answer in answers} == {b"HTTP/1.1 200", b"HTTP/1.1 503"}
            refused = [answer for answer in answers if b"503" in answer[:12]]
            assert 1 <= len(refused) <= 10
            assert all(
                part in answer for answer in refused for part in (b"retry-after", b"connection: close", b"too many")
            )
        wait_until(lambda: frontend.post("/v1/completions", {"prompt": "x"}).status_code == 200, "it serves")
        assert frontend.metric("requests_total", outcome="rejected", code="503") >= len(refused)
