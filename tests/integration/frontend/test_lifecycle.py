"""The frontend while its engine loads, fails, disconnects and returns, and while it is stopped."""

import errno
import json
import socket
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from protocol.requests import EnginePhase, EngineState
from services.cli.readiness import FrontendProbe
from services.config import HttpConfig
from services.frontend.http.listener import listen
from services.process import EXIT_HUNG
from tests.integration.frontend.scripted import (
    PATIENCE,
    READY,
    Frontend,
    ScriptedScheduler,
    answering,
    ended,
    ids_of,
    scripted,
    tokens,
    wait_until,
)

COMPLETIONS = "/v1/completions"
LOADING = EngineState(EnginePhase.LOADING)


def test_readiness_follows_the_engine_and_shows_its_progress() -> None:
    loading = EngineState(EnginePhase.LOADING, "reading weights", 0.25)
    key = {"authorization": "Bearer key"}
    with scripted(state=loading, api_key=["key"]) as (frontend, scheduler):
        readyz = f"{frontend.url}/readyz"
        wait_until(lambda: httpx.get(readyz).json()["phase"] == "loading", "the state has arrived")
        response = httpx.get(readyz, headers=key)
        assert response.status_code == 503
        assert response.json() == {"phase": "loading", "detail": "reading weights", "progress": 0.25}
        assert httpx.get(f"{frontend.url}/livez").status_code == 200
        for prompt in ("x", [5]):
            refused = frontend.post(COMPLETIONS, {"prompt": prompt}, headers=key)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert "reading weights" in refused.json()["error"]["message"]
        scheduler.send(READY)
        frontend.wait_ready()
        assert httpx.get(f"{frontend.url}/health").status_code == 200
        scheduler.send(EngineState(EnginePhase.FAILED, "the worker was killed"))
        wait_until(lambda: not frontend.ready(), "the failure is seen")
        assert httpx.get(readyz, headers=key).json()["detail"] == "the worker was killed"


NUMBER = "waiting for workers: 1 of 2 have registered"


def test_probes_without_a_key_show_fixed_texts() -> None:
    secret = EngineState(EnginePhase.FAILED, "OSError: /home/me/secret")
    for keys in ([], ["key"]):
        with scripted(state=secret, api_key=keys) as (frontend, scheduler):
            for path in ("/readyz", "/health"):
                wait_until(lambda url=frontend.url + path: "failed" in httpx.get(url).text, "the state has arrived")
                for headers in ({}, {"authorization": "Bearer wrong"}):
                    answer = httpx.get(frontend.url + path, headers=headers)
                    assert answer.status_code == 503
                    assert answer.json()["detail"] == "failed; the log has the reason"
            scheduler.send(EngineState(EnginePhase.WAITING_FOR_WORKERS, NUMBER))
            wait_until(lambda url=frontend.url: NUMBER in httpx.get(f"{url}/readyz").text, "the number is shown")


def test_probes_answer_head(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    for path in ("/livez", "/readyz", "/health"):
        got, headed = httpx.get(frontend.url + path), httpx.head(frontend.url + path)
        assert (headed.status_code, headed.content) == (200, b"")
        assert headed.headers["content-length"] == got.headers["content-length"]


def test_without_another_scheduler_in_time_open_requests_end_and_the_next_one_is_connected(stream: bool) -> None:
    with scripted(recovery_timeout_seconds=0.2) as (frontend, scheduler):
        scheduler.script(lambda request: [tokens(request.number, ids_of("words "))])
        body = {"prompt": "x", "stream": stream}
        asked = frontend.post_later(COMPLETIONS, body)
        scheduler.request()
        wait_until(lambda: frontend.metric("time_to_first_token_seconds_count") == 1, "the stream has begun")
        scheduler.close()
        answer = asked.result(PATIENCE)
        assert answer.status_code == (200 if stream else 503)
        last = answer.text.strip().split("\n\n")[-1].removeprefix("data: ")
        assert "gone" in json.loads(last)["error"]["message"]
        assert not frontend.ready()
        assert frontend.post(COMPLETIONS, body).status_code == 503
        scheduler.script(answering("back again"))
        scheduler.open()
        frontend.wait_ready()
        assert frontend.post(COMPLETIONS, {"prompt": "x"}).json()["choices"][0]["text"] == "back again"


def test_a_request_without_progress_ends_with_504(stream: bool) -> None:
    with scripted(request_timeout=2.0) as (frontend, scheduler):
        scheduler.script(lambda request: [tokens(request.number, ids_of("words "))])
        answer = frontend.post(COMPLETIONS, {"prompt": "x", "stream": stream})
        assert answer.status_code == (200 if stream else 504)
        error = json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
        assert (error["type"], "no progress" in error["message"]) == ("timeout_error", True)
        scheduler.wait_aborted(scheduler.request().number)


def test_sigterm_lets_the_open_stream_finish_and_refuses_new_requests() -> None:
    with scripted() as (frontend, scheduler):
        scheduler.script(lambda request: [tokens(request.number, ids_of("first "))])
        with httpx.stream(
            "POST", frontend.url + COMPLETIONS, json={"prompt": "x", "stream": True}, timeout=PATIENCE
        ) as stream:
            number = scheduler.request().number
            frontend.signal()
            wait_until(lambda: not frontend.ready(), "it is draining")
            assert httpx.get(f"{frontend.url}/readyz").json()["phase"] == "draining"
            assert httpx.get(f"{frontend.url}/livez").status_code == 200
            refused = frontend.post(COMPLETIONS, {"prompt": "x"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert frontend.process.poll() is None
            scheduler.send(tokens(number, ids_of("second"), len(ids_of("first "))))
            scheduler.send(ended(number))
            text = stream.read().decode()
        assert "second" in text
        assert text.endswith("data: [DONE]\n\n")
        assert frontend.wait() == 0
        assert "Traceback" not in frontend.log


def test_second_sigterm_ends_open_requests() -> None:
    with scripted() as (frontend, scheduler):
        asked = frontend.post_later(COMPLETIONS, {"prompt": "x"})
        number = scheduler.request().number
        frontend.signal()
        wait_until(lambda: not frontend.ready(), "it is draining")
        frontend.signal()
        assert frontend.wait() == 0
        assert asked.result(PATIENCE).status_code == 503
        scheduler.wait_aborted(number)


def test_a_frontend_that_drains_does_not_wait_for_a_scheduler_that_was_stopped_as_well() -> None:
    with scripted(recovery_timeout_seconds=600.0) as (frontend, scheduler):
        asked = frontend.post_later(COMPLETIONS, {"prompt": "x"})
        scheduler.request()
        scheduler.send(replace(READY, phase=EnginePhase.DRAINING))
        wait_until(lambda: not frontend.ready(), "the state has arrived")
        frontend.signal()
        wait_until(lambda: "draining: 1 open" in frontend.log, "it drains")
        scheduler.close()
        assert frontend.wait() == 0
        assert asked.result(PATIENCE).status_code == 503


def test_refused_handshake_ends_the_frontend_with_the_reason() -> None:
    patch = "from protocol.transport import client; client.PROTOCOL_VERSION = (99, 0)"
    with scripted(patch, state=LOADING) as (frontend, _):
        assert frontend.wait() == 4
        assert "99.0" in frontend.log


def test_scheduler_with_another_tokenizer_ends_open_requests_and_the_frontend() -> None:
    with scripted() as (frontend, scheduler):
        asked = frontend.post_later(COMPLETIONS, {"prompt": "x"})
        scheduler.request()
        scheduler.send(replace(READY, tokenizer="another"))
        assert frontend.wait() == 4
        assert asked.result(PATIENCE).status_code == 503
        assert "tokenizer mismatch" in frontend.log


@pytest.mark.parametrize("phase", [EnginePhase.READY, EnginePhase.DRAINING])
def test_loss_of_a_scheduler_is_a_warning_unless_it_was_stopping(phase: EnginePhase) -> None:
    with scripted() as (frontend, scheduler):
        scheduler.send(replace(READY, phase=phase))
        wait_until(lambda: frontend.ready() == (phase is EnginePhase.READY), "the state has arrived")
        scheduler.close()
        wait_until(lambda: "closed the connection" in frontend.log, "the loss is seen")
        scheduler.open()
        assert ("WARNING" in frontend.log) == (phase is EnginePhase.READY)


def test_a_frontend_whose_loop_hangs_ends_itself_and_says_where() -> None:
    """Its probes are not answered, but no signal has stopped it."""
    patch = """
from services.frontend import metrics, service
service.HANG_FACTOR, service.SIGN_INTERVAL = 0.3, 0.1
def spin(_):
    while True: pass
metrics.Metrics.render = spin
"""
    with scripted(patch) as (frontend, _):
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{frontend.url}/metrics", timeout=PATIENCE)
        assert frontend.wait() == EXIT_HUNG
        assert "in spin" in frontend.log


def test_taken_port_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with scripted(state=LOADING, port=port) as (frontend, _):
            assert frontend.wait() == 1
            assert f"cannot listen on 127.0.0.1 port {port}" in frontend.log
            assert "Traceback" not in frontend.log


def test_all_addresses_of_ipv6_include_those_of_ipv4() -> None:
    with listen(HttpConfig(host="::", port=0)) as listener:
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), PATIENCE).close()
    assert FrontendProbe(HttpConfig(host="::")).url == "http://127.0.0.1:8000"


def test_address_of_ipv6_without_ipv6_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutIPv6(socket.socket):
        def __init__(self, family: int, *others: int) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "not supported")
            super().__init__(family, *others)

    monkeypatch.setattr(socket, "socket", WithoutIPv6)
    with (
        pytest.raises(OSError, match="cannot listen on :: port 0: not supported"),
        listen(HttpConfig(host="::", port=0)),
    ):
        pass


def test_evil_template_is_refused_at_start(tmp_path: Path) -> None:
    file = tmp_path / "evil.jinja"
    file.write_text("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    with scripted(state=LOADING, chat_template=str(file)) as (frontend, _):
        assert frontend.wait() == 3
        assert "the chat template is broken" in frontend.log
