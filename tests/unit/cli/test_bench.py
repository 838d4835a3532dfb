"""The load generator against a stub of an OpenAI server that records its requests."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from services.cli.ask import NoAnswer, ServerAddress, ask_object
from services.cli.bench import bench
from services.cli.bench.load import LoadResult, SentRequest, run_load
from services.cli.bench.metrics import summarize
from services.cli.bench.report import CHART_HEIGHT, charts, report
from services.cli.settings import ConfigurationError
from services.config import BenchConfig
from tests.http_server import Handler, http_server


@dataclass
class StubServer:
    """Streams `max_tokens` chunks for each completion. Of `per_failure` completions one fails in the way that `failing`
    names."""

    url: str = ""
    failing: str = ""
    per_failure: int = 5
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    max_open: int = 0
    _open: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def open(self, body: dict[str, Any]) -> Iterator[str]:
        """Count a completion. Yield how it fails; "": it does not."""
        with self._lock:
            self.bodies.append(body)
            fails = len(self.bodies) % self.per_failure == 0
            self._open += 1
            self.max_open = max(self.max_open, self._open)
        yield self.failing if fails else ""
        with self._lock:
            self._open -= 1


class StubAPI(Handler):
    stub: StubServer

    def answer(self) -> None:
        if self.command == "GET":
            self.reply(200, b'{"data": [{"id": "stub"}]}')
            return
        self.stub.keys.add(self.headers["authorization"])
        body = json.loads(self.body())
        with self.stub.open(body) as failure:
            if failure == "refused":
                self.reply(429, b'{"error": {"message": "too busy"}}')
            else:
                self.send_response(200)
                self.end_headers()
                self._stream(body["max_tokens"], failure)

    def _stream(self, tokens: int, failure: str) -> None:
        for index in range(tokens):
            if failure and index == tokens // 2:
                if failure != "cut off":
                    self._send({"error": {"message": "engine died"}} if failure == "error event" else "a text")
                return
            self._send({"choices": [{"text": "x" * (index % 2)}]})  # some tokens have no text
        self._send({"choices": [], "usage": {"completion_tokens": tokens}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, event: object) -> None:
        """Send an event in two parts, the second one in time of its own."""
        data = f"data: {json.dumps(event)}\n\n".encode()
        self.wfile.write(data[:12])
        time.sleep(0.001)
        self.wfile.write(data[12:])


@pytest.fixture
def server() -> Iterator[StubServer]:
    stub = StubServer()
    with http_server(type("OneStubAPI", (StubAPI,), {"stub": stub})) as stub.url:
        yield stub


def config(server: StubServer, **values: Any) -> BenchConfig:
    return BenchConfig(base_url=server.url, **{"random_input_len": 7, "random_output_len": 5, **values})


def test_closed_loop_keeps_its_concurrency_and_sends_the_configured_requests(server: StubServer) -> None:
    load = run_load(config(server, num_prompts=24, max_concurrency=3, ignore_eos=True, api_key="sesame"))
    assert server.max_open == load.max_concurrent == 3
    assert [request.output_tokens for request in load.requests] == [5] * 24
    assert all(len(request.arrivals) == 5 and not request.error for request in load.requests)
    assert {len(body["prompt"]) for body in server.bodies} == {7}
    assert all(300 <= token < 1000 for body in server.bodies for token in body["prompt"])
    assert {body["model"] for body in server.bodies} == {"stub"}
    assert all(body["ignore_eos"] and body["stream"] for body in server.bodies)
    assert server.keys == {"Bearer sesame"}


def test_seed_determines_the_prompts(server: StubServer) -> None:
    first, again, other = (run_load(config(server, num_prompts=4, seed=seed)) for seed in (1, 1, 2))
    prompts = [[request.prompt for request in load.requests] for load in (first, again, other)]
    assert prompts[0] == prompts[1] != prompts[2]


def test_open_loop_spreads_arrivals(server: StubServer) -> None:
    load = run_load(config(server, num_prompts=40, request_rate=200.0, random_output_len=1))
    starts = [request.started for request in load.requests]
    assert starts == sorted(starts)
    assert starts[-1] - starts[0] > 0.1, "40 arrivals at a mean distance of 5 ms were sent at once"
    assert len({round(b - a, 3) for a, b in pairwise(starts)}) > 5


@pytest.mark.parametrize("failure", ["refused", "error event", "no event", "cut off"])
def test_failed_requests_are_counted_and_give_status_1(
    server: StubServer, failure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.failing = failure
    settings = config(server, num_prompts=10)
    result = summarize(settings, run_load(settings))
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (8, 2, 40)
    server.bodies.clear()
    for server.per_failure, is_reported in ((5, True), (1, False)):
        assert bench(settings) == 1
        printed = capsys.readouterr()
        assert "failed: " in printed.err
        assert ("Serving Benchmark Result" in printed.out) == is_reported


@pytest.mark.parametrize(
    ("options", "name"),
    [({"result_filename": "result.json"}, "result.json"), ({"save_result": True}, "bench-*-*.json"), ({}, "no file")],
)
def test_results_are_written_with_the_names_of_vllm(
    server: StubServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench(config(server, num_prompts=4, **options)) == 0
    assert [*tmp_path.glob(name)] == [*tmp_path.iterdir()]
    if not options:
        return
    (file,) = tmp_path.iterdir()
    result = json.loads(file.read_text())
    totals = {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens"}
    rates = {"request_throughput", "output_throughput", "total_token_throughput", "max_concurrency"}
    times = {
        f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")
    }
    assert totals | rates | times <= set(result)
    printed = capsys.readouterr().out
    assert "Output token throughput (tok/s):" in printed
    assert "Open requests" not in printed


KNOWN_LOAD = LoadResult(
    "m",
    [
        SentRequest([1] * 10, started=0.0, ended=1.0, arrivals=[0.2, 0.4, 0.6], output_tokens=3),
        SentRequest([1] * 10, started=1.0, ended=2.0, arrivals=[1.1, 1.5], output_tokens=5),
        SentRequest([1] * 10, started=1.0, ended=1.5, error="HTTP 500"),
    ],
    duration=2.0,
    max_concurrent=2,
)


def test_report_has_the_groups_of_vllm() -> None:
    lines = [*report(summarize(BenchConfig(num_prompts=3, max_concurrency=2), KNOWN_LOAD))]
    titles = [line.strip("-= ") for line in lines if line[0] in "-=" and line.strip("=")]
    assert titles == [
        "Serving Benchmark Result", "Time to First Token", "Time per Output Token (excl. 1st token)",
        "Inter-token Latency", "End-to-end Latency",
    ]  # fmt: skip
    values = dict(line.split(":") for line in lines if ":" in line)
    assert float(values["Output token throughput (tok/s)"]) == 4.0
    assert float(values["Peak output token throughput (tok/s)"]) == 3.0
    assert float(values["Mean TTFT (ms)"]) == 150.0
    assert int(values["Maximum request concurrency"]) == 2
    assert "Request rate configured (RPS)" not in values, "all requests were sent at once"


def test_chart_shows_tokens_and_open_requests_over_time() -> None:
    *tokens, _ = lines = [*charts(KNOWN_LOAD)][: CHART_HEIGHT + 2]
    assert "Output tokens per second" in lines[0]
    assert [column for column, cell in enumerate(tokens[-1]) if cell != " "] == [5, 10, 15, 27, 37]
    assert lines[-1].split() == ["0", "s", "2.0", "s"]
    opened = [*charts(KNOWN_LOAD)][CHART_HEIGHT + 2 :]
    assert "Open requests, 0 to 1" in opened[0], "one ends when the other begins"
    assert set(opened[CHART_HEIGHT]) == {"█"}


def test_chart_without_an_answer_is_empty() -> None:
    failed = SentRequest([1], started=0.0, ended=1.0, error="HTTP 500")
    assert [*charts(LoadResult("m", [failed], duration=1.0, max_concurrent=1))] == []


def test_metrics_of_a_known_load() -> None:
    result = summarize(BenchConfig(num_prompts=3), KNOWN_LOAD)
    expected = {
        "completed": 2, "failed": 1, "total_input_tokens": 20, "total_output_tokens": 8, "request_throughput": 1.0,
        "output_throughput": 4.0, "total_token_throughput": 14.0, "mean_ttft_ms": 150.0, "mean_tpot_ms": 150.0,
        "median_itl_ms": 200.0, "mean_e2el_ms": 1000.0, "request_rate": "inf",
    }  # fmt: skip
    assert {name: result[name] for name in expected} == pytest.approx(expected)


def test_url_of_a_client_is_the_url_of_the_server(server: StubServer) -> None:
    load = run_load(BenchConfig(base_url=f"{server.url}/v1/", num_prompts=1, random_output_len=1))
    assert [request.error for request in load.requests] == [""]


def test_no_proxy_is_asked_for_a_server_on_this_machine(server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert ask_object(ServerAddress(server.url), "/v1/models", "data")["data"]


def test_file_that_cannot_be_written_is_refused_before_the_load(server: StubServer, tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "missing" / "result.json"):
        with pytest.raises(ConfigurationError, match="--result-filename: cannot write"):
            bench(config(server, result_filename=str(file)))
    assert server.bodies == []


def test_missing_server_is_a_server_error() -> None:
    with pytest.raises(NoAnswer, match=r"^no server answers at http://127\.0\.0\.1:9: connection refused$"):
        run_load(BenchConfig(base_url="http://127.0.0.1:9"))
