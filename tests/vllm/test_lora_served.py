"""Adapters through HTTP: `runahead serve --enable-lora`, changed while it runs, and after its worker was killed."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from services.frontend.adapters import Adapters
from tests.e2e.server import ServeProcess, wait_until
from tests.vllm import checkpoints
from tests.vllm.preloaded import processes, serving_preloaded
from tests.vllm.reference import VllmRequest, generate

PROMPT = [(i * 31) % 4000 + 10 for i in range(40)]
OUTPUT = 200
"""Tokens that take long enough for a worker to be killed within them."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, `base`, and three adapters."""
    directory = tmp_path_factory.mktemp("adapters")
    base = checkpoints.make("qwen3", directory / "base")
    for seed, name in enumerate("abc"):
        checkpoints.make_adapter(directory / name, base, seed)
    return directory


@pytest.fixture(scope="module")
def expected(directory: Path) -> dict[str, list[int]]:
    """vLLM's answers by model."""
    loading = Adapters(directory / "base", 8)
    adapters = [None, *(loading.load(name, str(directory / name)) for name in "abc")]
    greedy = {"temperature": 0.0, "max_tokens": OUTPUT, "ignore_eos": True}
    alone = [[VllmRequest(PROMPT, greedy, lora=adapter)] for adapter in adapters]
    settings = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_model_len": 512}
    with processes() as pool:
        tokens = pool.submit(generate, str(directory / "base"), alone, **settings).result().tokens
    return {name: batch[0] for name, batch in zip(("base", *"abc"), tokens, strict=True)}


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[ServeProcess]:
    with serving_preloaded(
        directory / "base", "--max-model-len", "512", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8",
        "--lora-modules", f"a={directory}/a", "--lora-modules", f"b={directory}/b", "--enable-admin-routes",
    ) as running:  # fmt: skip
        yield running


def complete(server: ServeProcess, model: str) -> list[int]:
    body = {
        "model": model, "prompt": PROMPT, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=200)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def requests(server: ServeProcess, state: str) -> float:
    found = re.findall(rf"^vllm:num_requests_{state}\{{.*\}} (\S+)$", server.get("/metrics")[1], re.MULTILINE)
    return sum(map(float, found))


def change(server: ServeProcess, route: str, **body: str) -> tuple[int, str]:
    answer = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)
    return answer.status_code, answer.text


def test_adapters_are_models_with_a_parent(server: ServeProcess) -> None:
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [(entry["id"], entry.get("parent")) for entry in listed] == [
        ("base", None), ("a", "base"), ("b", "base")
    ]  # fmt: skip


def test_streams_of_all_models_go_on_when_their_worker_is_killed(
    server: ServeProcess, directory: Path, expected: dict[str, list[int]]
) -> None:
    """An adapter is loaded while others are in use, and unloaded while a stream uses it. The third one waits for a
    seat. Then the worker is killed, and its successor reads the adapters again."""
    models = ["base", "a", "b", "c", "a", "base"]
    with ThreadPoolExecutor(len(models)) as threads:
        first = [threads.submit(complete, server, model) for model in ("base", "a", "b")]
        assert change(server, "load_lora_adapter", lora_name="c", lora_path=f"{directory}/c")[0] == 200
        assert [future.result() for future in first] == [expected[model] for model in ("base", "a", "b")]
        running = [threads.submit(complete, server, model) for model in models]
        # Those of the adapter that came last wait: one stream or two.
        wait_until(lambda: requests(server, "waiting") and requests(server, "running") >= 4, "two adapters run")
        assert change(server, "unload_lora_adapter", lora_name="b")[0] == 200
        server.services["worker"].kill()
        assert [future.result() for future in running] == [expected[model] for model in models]
    assert httpx.post(f"{server.url}/v1/completions", json={"model": "b", "prompt": "x"}).status_code == 404


def test_bad_adapters_are_refused_by_name(server: ServeProcess, directory: Path) -> None:
    def load(name: str, path: str) -> tuple[int, str]:
        return change(server, "load_lora_adapter", lora_name=name, lora_path=path)

    wide = checkpoints.make_adapter(directory / "wide", directory / "base", 9, rank=16)
    for name, path, why in (
        ("a", f"{directory}/a", "already"),
        ("base", f"{directory}/a", "already"),
        ("d", f"{directory}/none", "no directory"),
        ("d", f"{directory}/base", "no adapter_config.json"),
        ("d", str(wide), "rank 16"),
    ):
        status, text = load(name, path)
        assert (status, why in text) == (400, True), text
    assert change(server, "unload_lora_adapter", lora_name="d")[0] == 404
