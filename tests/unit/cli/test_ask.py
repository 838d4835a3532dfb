"""Commands about a running server, when another program answers at the address."""

import json
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import certifi
import pytest

from tests.certificates import AUTHORITY, CERTIFICATE, KEY, TLS
from tests.http_server import Handler, http_server
from tests.unit.cli.command import run_command

ANSWERS = {"/page": b"<html>", "/list": b"[1]", "/other": b'{"version": "1"}', "/binary": b"\xff\xfe"}

REFUSALS = {
    "/refused": b'{"error": {"message": "steps are not recorded here"}}',
    "/none": b"",
    "/text": b"no such page",
    "/error": b'{"error": "unknown"}',
}
TWO_ENGINES = {
    "/two/server_info": b'{"phase": "ready", "detail": "ready", "served_model_names": ["m"], "features": {}, '
    b'"max_model_len": 8, "num_blocks": 600, "block_size": 16, "version": "1"}',
    "/two/metrics": "".join(
        f'runahead:{name}{{engine="{engine}",model_name="m"}} {value}\n'
        for name, values in (("kv_cache_usage_perc", (0.5, 0.7)), ("engine_ready", (1.0, 1.0)), ("epoch", (4.0, 4.0)))
        for engine, value in enumerate(values)
    ).encode()
    + b'runahead:e2e_request_latency_seconds_bucket{engine="0",le="0.3",model_name="m"} 1.0\n',
}
NOT_SERVED = b'{"error": {"message": "GET /x is not served here; /openapi.json lists all routes"}}'


class _OtherProgram(Handler):
    keys: ClassVar[list[str | None]] = []

    def answer(self) -> None:
        self.keys.append(self.headers["authorization"])
        if self.path.startswith("/moved/"):
            self.reply(302, location=self.path.removeprefix("/moved"))
            return
        path = "/" + self.path.split("/")[1]
        served = TWO_ENGINES.get(self.path) or ANSWERS.get(path)
        self.reply(200 if served else 404, served or REFUSALS.get(path, NOT_SERVED))


@pytest.fixture(scope="module")
def other_program() -> Iterator[str]:
    with http_server(_OtherProgram) as url:
        yield url


@pytest.mark.parametrize("path", ANSWERS)
def test_answer_of_another_program_is_one_line(
    other_program: str, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNAHEAD_URL", "http://127.0.0.1:9")  # the command line takes precedence
    url, file, settings = other_program + path, tmp_path / "trace.json", tmp_path / "settings.yaml"
    settings.write_text("max-num-seqs: 3")
    for command in (
        *(["status", url], ["trace", "--url", url, "-o", str(file)]),
        *(["drain", "e", "--url", url], ["replan", url, "--config", str(settings)]),
    ):
        done = run_command(capsys, *command)
        assert (done.status, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert done.stderr.startswith(f"runahead: {url}/")
        assert "the answer is not that of a Runahead server" in done.stderr
    assert not file.exists()


def test_status_of_two_engines_has_the_mean_of_their_kv_cache_usage(
    other_program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run_command(capsys, "status", f"{other_program}/two").stdout
    assert "engines     ready 2\n" in text
    assert "KV cache    600 blocks of 16 tokens, 60.0% in use" in text
    metrics = json.loads(run_command(capsys, "status", f"{other_program}/two", "--json").stdout)["metrics"]
    assert metrics == {"kv_cache_usage_perc": 0.6, "engine_ready": 2.0, "epoch": 4.0}


def test_a_key_is_for_the_given_address_alone(other_program: str, capsys: pytest.CaptureFixture[str]) -> None:
    _OtherProgram.keys.clear()
    assert run_command(capsys, "status", f"{other_program}/moved/two", "--api-key", "sesame").status == 0
    assert _OtherProgram.keys == ["Bearer sesame", None] * 2


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_command_whose_output_nobody_reads_ends_without_a_message(other_program: str, unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "status", f"{other_program}/two"],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("path", REFUSALS)
def test_the_reason_of_a_refusal_is_shown_if_there_is_one(
    other_program: str, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = ": steps are not recorded here" if path == "/refused" else ""
    for command in (["trace", "-o", str(tmp_path / "trace.json")], ["bench"]):
        done = run_command(capsys, *command, "--url", other_program + path)
        assert done.stderr.endswith(f"status 404{reason}\n")


@pytest.fixture(scope="module")
def tls_program() -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, KEY)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(AUTHORITY)
    with http_server(_OtherProgram, context) as url:
        yield url


@pytest.mark.parametrize("command", ["status", "trace", "bench", "run-batch"])
def test_every_command_trusts_a_server_in_the_same_way(
    tls_program: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An authority that is named is checked, also on this machine, unless nothing is to be checked. The server asks for
    a certificate."""
    (tmp_path / "in.jsonl").write_text("")
    more = {
        "trace": ["-o", str(tmp_path / "trace.json")],
        "run-batch": ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")],
    }.get(command, [])
    known, unknown = AUTHORITY, certifi.where()

    def complaint(*trust: str, presented: Sequence[str] = TLS) -> str:
        return run_command(capsys, command, "--url", tls_program, *more, *trust, *presented).stderr

    assert "answer" in complaint(presented=())
    assert "certificate verify failed" in complaint("--cacert", unknown).lower().replace("_", " ")
    for trust in ([], ["--cacert", known], ["--insecure", "--cacert", unknown]):
        assert "status 404" in complaint(*trust)
    assert "--cacert: cannot use /no/such.pem: No such file" in complaint("--cacert", "/no/such.pem")
    assert "with the key /no/such.pem: No such file" in complaint(presented=(*TLS, "--ssl-keyfile", "/no/such.pem"))
