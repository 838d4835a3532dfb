"""Traces of requests at a collector: spans, times, attributes, and events of recoveries."""

import re
from collections.abc import Iterator
from contextlib import closing

import pytest
from msgspec.structs import replace

from protocol.requests import EnginePhase, EngineState, FinishReason, RequestTimes
from tests.integration.frontend.collector import TRANSPORTS, CollectedTraces
from tests.integration.frontend.scripted import (
    READY,
    TOKENIZER,
    Frontend,
    ScriptedScheduler,
    answering,
    ended,
    endpoint,
    scripted,
    tokens,
    wait_until,
)

COMPLETIONS = "/v1/completions"
TIMES = RequestTimes(queued=100.0, scheduled=100.002, first_token=100.004, ended=100.005)
Traced = tuple[Frontend, ScriptedScheduler, CollectedTraces]


def environment(protocol: str) -> str:
    return (
        f"import os\nos.environ['OTEL_EXPORTER_OTLP_TRACES_PROTOCOL'] = {protocol!r}\n"
        "os.environ['OTEL_BSP_SCHEDULE_DELAY'] = '50'\n"
    )


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    with (
        TRANSPORTS["http/protobuf"]() as (url, collected),
        scripted(environment("http/protobuf"), served_model_name=["demo"], otlp_traces_endpoint=url) as pair,
    ):
        yield *pair, collected


def test_each_choice_has_its_phases_below_the_request(traced: Traced, stream: bool) -> None:
    frontend, scheduler, collected = traced
    scheduler.script(answering("secret answer", times=TIMES, num_cached_tokens=1))
    trace, parent, name = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", f"phases-{stream}"
    headers = {"x-request-id": name, "traceparent": f"00-{trace}-{parent}-01"}
    body = {"prompt": "secret prompt", "n": 2, "max_tokens": 64, "temperature": 0.5, "stream": stream}
    frontend.post(COMPLETIONS, body, headers=headers)
    root, below = collected.request(name)
    assert (root.name, root.trace, root.parent) == ("text_completion demo", trace, parent)
    assert not root.failed
    num_tokens = len(TOKENIZER.encode("secret answer", add_special_tokens=False))
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "demo",
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": len(TOKENIZER.encode("secret prompt")),
        "gen_ai.usage.output_tokens": 2 * num_tokens,
        "gen_ai.response.finish_reasons": ["stop", "stop"],
        "http.response.status_code": 200,
        "http.route": COMPLETIONS,
    }
    assert expected.items() <= root.attributes.items()
    assert root.attributes["gen_ai.latency.time_in_queue"] == pytest.approx(0.002)
    for index in range(2):
        spans = {span.name: span for span in below if span.attributes["runahead.choice"] == index}
        assert set(spans) == {"queue", "prefill", "decode", "detokenise"}
        queue, prefill, decode = spans["queue"], spans["prefill"], spans["decode"]
        assert queue.ended == prefill.began
        assert prefill.ended == decode.began
        lasted = [(span.ended - span.began) / 1e6 for span in (queue, prefill, decode)]
        assert lasted == pytest.approx([2.0, 2.0, 1.0], abs=0.01), "milliseconds on the scheduler's clock"
        assert all(span.trace == trace for span in spans.values())
        assert root.began <= spans["detokenise"].began <= spans["detokenise"].ended <= root.ended
        assert prefill.attributes["runahead.cached_tokens"] == 1
        assert spans["detokenise"].attributes["gen_ai.usage.output_tokens"] == num_tokens
    assert b"secret" not in collected.raw


def test_failed_and_refused_requests_have_a_trace_without_a_parent(traced: Traced) -> None:
    frontend, scheduler, collected = traced
    scheduler.script(lambda request: [ended(request.number, FinishReason.ERROR, message="the worker failed")])
    frontend.post(COMPLETIONS, {"prompt": [5]}, headers={"x-request-id": "failed"})
    frontend.post(COMPLETIONS, {"prompt": [5], "n": 129}, headers={"x-request-id": "invalid"})
    failed, _ = collected.request("failed")
    assert (failed.failed, failed.parent, failed.attributes["error.type"]) == (True, "", "500")
    invalid, below = collected.request("invalid")
    assert (invalid.failed, invalid.attributes["http.response.status_code"], below) == (False, 400, [])


def test_a_stream_that_moves_has_the_times_of_its_last_engine_and_recoveries_of_its_own_ones() -> None:
    ready, patch = replace(READY, identity="that of both"), environment("http/protobuf")
    with (
        TRANSPORTS["http/protobuf"]() as (url, collected),
        endpoint() as other,
        closing(ScriptedScheduler(other, EngineState(EnginePhase.LOADING))) as second,
        scripted(patch, ready, more_endpoints=[other], otlp_traces_endpoint=url) as (frontend, first),
    ):
        stayed = frontend.post_later(COMPLETIONS, {"prompt": [5]}, headers={"x-request-id": "stayed"})
        number = first.request().number
        lost = EnginePhase.RECOVERING
        for engine, phase, count in ((second, 2, 2), (first, lost, 1), (first, 2, 2), (second, lost, 1)):
            engine.send(replace(ready, phase=EnginePhase(phase)))
            wait_until(lambda n=count: frontend.metric("engine_ready") == n, f"{count} engines are ready")
        first.send(ended(number, times=TIMES))
        stayed.result()
        root, _ = collected.request("stayed")
        assert [name for name, _ in root.events] == ["engine lost", "engine recovered"]
        assert root.began < root.events[0][1] < root.events[1][1] < root.ended

        body = {"prompt": [5], "max_tokens": 2}
        moved = frontend.post_later(COMPLETIONS, body, headers={"x-request-id": "moved"})
        first.send(tokens(first.request(1).number, [5]))
        second.script(lambda request: [tokens(request.number, [6], first=1), ended(request.number, times=TIMES)])
        second.send(EngineState(EnginePhase.LOADING))
        second.send(ready)
        wait_until(lambda: frontend.metric("engine_ready") == 2, "the second engine is ready")
        first.send(replace(ready, phase=EnginePhase.DRAINING))
        moved.result()
        root, below = collected.request("moved")
        ends = {span.name: span.ended for span in below}
        assert ends["decode"] == ends["detokenise"], "the first engine's submission bounds nothing"
        assert root.events == []


def test_grpc_is_the_default_protocol_and_the_last_traces_leave_at_the_end() -> None:
    patch = environment("grpc").replace("['OTEL_BSP_SCHEDULE_DELAY'] = '50'", "['OTEL_BSP_SCHEDULE_DELAY'] = '60000'")
    patch = re.sub(r".*TRACES_PROTOCOL.*", "import os", patch)
    with TRANSPORTS["grpc"]() as (url, collected), scripted(patch, otlp_traces_endpoint=url) as (frontend, scheduler):
        scheduler.script(answering("a", times=TIMES))
        frontend.post(COMPLETIONS, {"prompt": [5]}, headers={"x-request-id": "last"})
        frontend.signal()
        assert frontend.wait() == 0
        _, below = collected.request("last")
        assert sorted(span.name for span in below) == ["decode", "detokenise", "prefill", "queue"]


@pytest.mark.parametrize("protocol", TRANSPORTS)
def test_failing_exports_are_logged_when_they_begin_and_when_they_end(protocol: str) -> None:
    with (
        TRANSPORTS[protocol]() as (url, collected),
        scripted(environment(protocol), otlp_traces_endpoint=url) as (frontend, scheduler),
    ):
        collected.refuses = True
        for number in range(1, 4):
            scheduler.script(answering("a", times=TIMES))
            frontend.post(COMPLETIONS, {"prompt": [5]})
            wait_until(lambda n=number: collected.num_refused >= n, "the export was refused")
        collected.refuses = False
        scheduler.script(answering("a", times=TIMES))
        frontend.post(COMPLETIONS, {"prompt": [5]}, headers={"x-request-id": "after"})
        collected.request("after")
        wait_until(lambda: "traces are exported" in frontend.log, "the second line is in the log")
        lines = [line for line in frontend.log.splitlines() if "traces" in line or "opentelemetry" in line]
    assert [" ".join(line.split()[2:7]) for line in lines] == [
        "WARNING runahead.frontend: traces are dropped:",
        "INFO runahead.frontend: traces are exported",
    ]
    assert f"{url} accepts {protocol} (OTEL_EXPORTER_OTLP_TRACES_PROTOCOL)" in lines[0]


def test_without_the_packages_the_flag_is_refused_in_one_line() -> None:
    code = "import sys\nsys.modules['opentelemetry'] = None"
    loading = EngineState(EnginePhase.LOADING)
    with scripted(code, state=loading, otlp_traces_endpoint="http://127.0.0.1:4317") as (frontend, _):
        assert frontend.wait() == 1
    assert re.fullmatch(
        r"\S+ \S+ ERROR runahead: --otlp-traces-endpoint needs packages that are not installed \(.*\); "
        r"install the extra: pip install 'runahead-engine\[otel\]'\n",
        frontend.log,
    )
