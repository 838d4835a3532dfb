"""`runahead run-batch` against a small HTTP server: lines, order, errors, a lost server."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.cli.run_batch.lines import BatchRefusal, BatchRequest, parse
from services.cli.run_batch.requests import pause_of
from tests.http_server import Handler, http_server
from tests.unit.cli.command import Done, run_command

Capture = pytest.CaptureFixture[str]


def line(custom_id: str, url: str = "/v1/chat/completions", **more: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {}} | more)


class Api(Handler):
    """Answers with the path and the body. The first request of "twice" is refused for load; a proxy answers
    "proxy"; "last" ends the server."""

    protocol_version = "HTTP/1.1"
    refused: set[str]

    def answer(self) -> None:
        if self.command == "GET":
            self.reply(200, b'{"data": []}')
            return
        body = json.loads(self.body())
        user = body.get("user", "")
        if user == "last":
            self.server.shutdown()
            self.server.server_close()
            self.close_connection = True
        elif user == "twice" and user not in self.refused:
            self.refused.add(user)
            self.reply(429, b"{}")
        elif user == "proxy":
            self.reply(502, b"bad \xff")
        else:
            answer = json.dumps({"path": self.path, **body}).encode()
            self.reply(404 if user == "missing" else 200, answer, x_request_id="r-1")


@contextmanager
def serving() -> Iterator[str]:
    Api.refused = set()
    with http_server(Api) as url:
        yield f"{url}/v1"


def run(capsys: Capture, path: Path, lines: list[str], url: str, *more: str) -> tuple[Done, list[Any]]:
    (path / "in.jsonl").write_text("\n".join(lines) + "\n", encoding="latin-1")
    target = path / "out.jsonl"
    done = run_command(capsys, "run-batch", "-i", str(path / "in.jsonl"), "-o", str(target), "--url", url, *more)
    return done, [json.loads(text) for text in target.read_text().splitlines()] if target.exists() else []


def test_answers_are_in_the_order_of_the_input(capsys: Capture, tmp_path: Path) -> None:
    lines = [line(f"r{i}", body={"user": str(i)}) for i in range(40)]
    with serving() as url:
        done, answers = run(capsys, tmp_path, lines, url, "--max-concurrency", "3")
    assert (done.status, done.stderr) == (0, "")
    assert done.stdout.startswith("40 lines written to ")
    assert [answer["custom_id"] for answer in answers] == [f"r{i}" for i in range(40)]
    assert answers[7]["response"] == {
        "status_code": 200, "request_id": "r-1", "body": {"path": "/v1/chat/completions", "user": "7"}
    }  # fmt: skip
    assert len({answer["id"] for answer in answers}) == 40


def test_errors_belong_to_their_lines(capsys: Capture, tmp_path: Path) -> None:
    lines = [
        line("a", body={"user": "missing"}),
        json.dumps({"custom_id": "ü"}, ensure_ascii=False),
        line("b", body={"user": "twice"}),
        "",
        line("a"),
        line("c", body={"user": "proxy"}),
    ]
    with serving() as url:
        done, answers = run(capsys, tmp_path, lines, url)
    assert done.status == 1
    assert "5 lines written" in done.stdout
    assert "4 with errors" in done.stdout
    assert [(a["response"] or {}).get("status_code") for a in answers] == [404, None, 200, None, 502]
    assert answers[-1]["response"]["body"] == "bad \ufffd"
    assert [(a["error"] or {}).get("code") for a in answers] == [
        None, "invalid_json_line", None, "duplicate_custom_id", None
    ]  # fmt: skip


def test_half_of_a_surrogate_pair_is_written_as_it_was_read(capsys: Capture, tmp_path: Path) -> None:
    with serving() as url:
        _, answers = run(capsys, tmp_path, [line("\ud800ü"), line("b")], url)
    assert [answer["custom_id"] for answer in answers] == ["\ud800ü", "b"]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("3", 3.0), ("0", 0.1), ("1e9", 600.0), ("nan", 1.0), ("soon", 1.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.1)],
)
def test_pause_before_a_request_is_sent_again(given: str, seconds: float) -> None:
    assert pause_of(httpx.Response(503, headers={"retry-after": given})) == seconds


def test_a_lost_server_stops_the_batch_with_the_answers_so_far(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.cli.run_batch.requests.PAUSE_SECONDS", 0.0)  # connections are refused at once
    lines = [line("a"), line("b", body={"user": "last"}), *(line(f"r{i}") for i in range(100))]
    with serving() as url:
        done, answers = run(capsys, tmp_path, lines, url, "--max-concurrency", "1")
    assert done.status == 2
    assert "the server is gone" in done.stderr
    assert "stopped before the end of the input" in done.stdout
    assert [answer["custom_id"] for answer in answers] == ["a"]


@pytest.mark.parametrize(
    ("source", "target", "error"),
    [
        ("in.jsonl", "/dev/full", "/dev/full: No space left on device"),
        ("/proc/self/mem", "out.jsonl", "/proc/self/mem: Input/output error"),
    ],
    ids=["full disk", "unreadable"],
)
def test_file_that_fails_is_named(capsys: Capture, tmp_path: Path, source: str, target: str, error: str) -> None:
    (tmp_path / "in.jsonl").write_text(line("a"))
    with serving() as url:
        done = run_command(
            capsys, "run-batch", "-i", str(tmp_path / source), "-o", str(tmp_path / target), "--url", url
        )
    assert (done.status, done.stderr) == (2, f"runahead: {error}\n")
    assert done.stdout.startswith(f"0 lines written to {tmp_path / target}")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "invalid_json_line"),
        ("[]", "invalid_json_line"),
        (json.dumps({"url": "/v1/completions", "body": {}}), "missing_custom_id"),
        (line(""), "missing_custom_id"),
        (line("a", method="GET"), "invalid_method"),
        (line("a", url="/v1/files"), "invalid_url"),
        (line("a", url=["/v1/completions"]), "invalid_url"),
        (line("a", body=[]), "invalid_body"),
        (line("a", body={"stream": True}), "invalid_body"),
        (line("used"), "duplicate_custom_id"),
    ],
)
def test_line_that_cannot_be_sent(text: str, code: str) -> None:
    refusal = parse(text.encode(), {"used": 1}, 2)
    assert isinstance(refusal, BatchRefusal)
    assert refusal.code == code


def test_slash_at_the_end_of_a_route_is_left_out() -> None:
    found = parse(line("a", url="/v1/completions/").encode(), {}, 1)
    assert isinstance(found, BatchRequest)
    assert found.url == "/v1/completions"


def test_every_route_of_a_batch_is_served() -> None:
    from services.cli.run_batch.lines import ROUTES
    from services.config import FrontendConfig
    from services.frontend.app import with_routes

    documented = with_routes(FrontendConfig()).openapi()["paths"]
    assert all("post" in documented[path] for path in ROUTES)
    assert all(isinstance(parse(line("a", url=path).encode(), {}, 1), BatchRequest) for path in ROUTES)
