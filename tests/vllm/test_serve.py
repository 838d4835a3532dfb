"""`runahead serve --backend vllm` as a user starts it: the same answers as vLLM, and a clean end."""

import re
import signal
from collections.abc import Iterator

import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from services.checkpoint import DEMO_MODEL
from tests.e2e.server import ServeProcess, serving
from tests.vllm.preloaded import processes
from tests.vllm.reference import VllmRequest, generate

OUTPUT = 32
PROMPTS = ("The os module provides", "A list is", "Open a file with")


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    with serving(
        "--backend", "vllm", "--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20),
        forked=False,
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def client(server: ServeProcess) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id


def test_streamed_text_equals_vllms(client: OpenAI, model: str) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    settings = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}]
    requests = [(tokenizer.encode(prompt).ids, setting) for prompt in PROMPTS for setting in settings]
    batch = [VllmRequest(prompt, {"max_tokens": OUTPUT, "ignore_eos": True, **setting}) for prompt, setting in requests]
    with processes() as pool:
        reference = pool.submit(generate, str(DEMO_MODEL), [batch]).result()
    for (prompt, setting), expected in zip(requests, reference.tokens[0], strict=True):
        stream = client.completions.create(
            model=model, prompt=prompt, max_tokens=OUTPUT, stream=True, extra_body={"ignore_eos": True}, **setting
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == tokenizer.decode(expected)


def test_stop_leaves_nothing_and_prints_nothing_of_the_libraries(server: ServeProcess) -> None:
    """The last test of this file that needs the server."""
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    server.assert_nothing_is_left()
    lines = [line for line in server.log.read_text().splitlines() if line.startswith("worker")]
    assert "leaving: the scheduler is stopping" in lines[-1]


def test_vllms_log_lines_have_the_format_of_the_service(server: ServeProcess) -> None:
    log = server.log.read_text()
    assert re.search(r"^worker +\| \S+ \S+ WARNING vllm\.\S+: ", log, re.MULTILINE)
    assert "Logging error" not in log
