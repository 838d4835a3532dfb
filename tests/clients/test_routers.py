"""Two engines behind SGLang's router, under its old and its new name."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from tests.clients.conftest import RunningServer, serving
from tests.clients.questions import MESSAGES

ROUTERS = {
    "sglang-router": (sys.executable, "-m", "sglang_router.launch_router"),
    "smg": (sys.executable, "-m", "smg", "launch"),  # both packages have a program of this name
}
PATIENCE = 60.0
"""Seconds until the router serves."""


@pytest.fixture(scope="module")
def engines(server: RunningServer) -> Iterator[list[RunningServer]]:
    with serving() as other:
        yield [server, other]


@pytest.mark.parametrize("name", ROUTERS)
def test_two_engines_behind_a_router(engines: list[RunningServer], name: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    command = [
        *ROUTERS[name], "--worker-urls", *(engine.url for engine in engines), "--host", "127.0.0.1", "--port", port,
        "--policy", "round_robin",
    ]  # fmt: skip
    before = [completed(engine.url) for engine in engines]
    log = tmp_path / "router.log"
    with log.open("wb") as file:
        router = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_served(url, router, log)
        with OpenAI(base_url=f"{url}/v1") as client:
            assert {model.id for model in client.models.list()} == {engines[0].model}
            for stream in (False, True) * 2:
                request = {"model": engines[0].model, "messages": MESSAGES, "max_tokens": 4, "temperature": 0}
                if stream:
                    assert len([*client.chat.completions.create(**request, stream=True)]) > 1
                else:
                    assert client.chat.completions.create(**request).choices[0].message.content
        assert all(completed(e.url) > count for e, count in zip(engines, before, strict=True))
    finally:
        router.terminate()
        router.wait(30)


def wait_until_served(url: str, router: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while router.poll() is None and time.monotonic() < deadline:
        try:
            if (answer := httpx.get(f"{url}/v1/models", timeout=5)).status_code == 200 and answer.json().get("data"):
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.25)
    raise AssertionError(f"the router does not serve: {log.read_text()[-2000:]}")


def completed(url: str) -> float:
    """Return the number of requests that an engine has served."""
    lines = httpx.get(f"{url}/metrics", timeout=5).text.splitlines()
    found = [line for line in lines if line.startswith("vllm:request_success_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in found)
