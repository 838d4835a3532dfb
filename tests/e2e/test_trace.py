"""`runahead trace` of a running server."""

import json
from pathlib import Path

import pytest
from openai import OpenAI

from tests.e2e.server import ServeProcess, wait_until
from tests.unit.cli.command import run_command
from tests.unit.cli.trace_format import check


def test_the_last_steps_of_a_server_become_a_trace(
    sim: ServeProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with OpenAI(base_url=f"{sim.url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        client.completions.create(
            model=model, prompt="x", max_tokens=20, extra_headers={"x-request-id": "traced"},
            extra_body={"ignore_eos": True},
        )  # fmt: skip

    def has_ended() -> bool:  # other tests use the server, too
        status, body = sim.get("/debug/steps?limit=100")
        entries = json.loads(body)["entries"] if status == 200 else []
        return any(each.get("request_id") == "traced" and each.get("outcome") for each in entries)

    wait_until(has_ended, "the end is recorded")
    file = tmp_path / "trace.json"
    done = run_command(capsys, "trace", "--url", f"{sim.url}/v1", "-o", str(file))
    assert (done.status, done.stderr) == (0, "")
    assert done.stdout.endswith(f"written to {file}; open it in Perfetto\n")
    trace = json.loads(file.read_text())
    arrows = check(trace)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    (request,) = (event for event in slices if event["args"].get("request_id") == "traced")
    assert request["args"]["outcome"] == "LENGTH"
    assert {"queue", "prefill", "decode"} <= {e["name"] for e in slices if e["tid"] == request["tid"]}
    assert all(source["name"] == target["name"] for _, source, target in arrows)
    names = [arrow.name for arrow in arrows]
    assert names.count("plan") == names.count("result") >= 19


def test_a_file_or_a_server_that_is_not_there_is_one_line(
    sim: ServeProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing" / "trace.json"
    for url, file in (("http://127.0.0.1:1", tmp_path / "trace.json"), (sim.url, missing), (sim.url, tmp_path)):
        done = run_command(capsys, "trace", "--url", url, "-o", str(file), "--seconds", "600")
        assert (done.status, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert ("--output: " in done.stderr) == (url == sim.url)


def test_steps_of_the_next_seconds_are_recorded(
    sim: ServeProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.json"
    done = run_command(capsys, "trace", "--url", sim.url, "--seconds", "0.2", "-o", str(file))
    assert done.status == 0
    assert int(done.stdout.split()[0]) < 20, "steps of the first test are older"
    check(json.loads(file.read_text()))
