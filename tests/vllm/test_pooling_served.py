"""Models that embed, classify or score, through HTTP: vLLM's own numbers, before and after their worker was killed."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import ServeProcess, wait_until
from tests.vllm import pooling_checkpoints
from tests.vllm.pooling_checkpoints import CONTEXT
from tests.vllm.preloaded import serving_preloaded
from tests.vllm.reference import pool_texts

QUERY = "what is a queue"
TEXTS = [f"{'a list of words ' * (n % 5)}number {n}" for n in range(12)]
CLOSE = {"rel": 1e-4, "abs": 1e-5}


@contextmanager
def served(name: str, directory: Path) -> Iterator[ServeProcess]:
    model = pooling_checkpoints.make(name, directory / name)
    with serving_preloaded(model, "--max-model-len", str(CONTEXT), "--max-num-batched-tokens", str(CONTEXT)) as running:
        yield running


def post(server: ServeProcess, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=200)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(server: ServeProcess, path: str, **body: Any) -> tuple[int, str]:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    return answer.status_code, answer.json()["error"]["message"]


def test_pairs_go_on_when_their_worker_is_killed(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    """The tokenizer marks the second text of a pair, and prompts are whole in every step, before and after."""
    with served("bert-scorer", tmp_path) as server:
        reference = pool.submit(
            pool_texts, str(tmp_path / "bert-scorer"), "score", [QUERY, TEXTS], max_model_len=CONTEXT
        )

        def scores() -> list[float]:
            return [e["score"] for e in post(server, "/score", queries=QUERY, documents=TEXTS)["data"]]

        expected = pytest.approx([values[0] for values in reference.result()], **CLOSE)
        assert scores() == expected
        with ThreadPoolExecutor(8) as threads:
            running = [threads.submit(scores) for _ in range(40)]
            wait_until(lambda: any(future.done() for future in running), "an answer")
            server.services["worker"].kill()
            assert [future.result() for future in running] == [expected] * 40
        ranked = post(server, "/v2/rerank", query=QUERY, documents=TEXTS, top_n=3)["results"]
        best = sorted((values[0] for values in reference.result()), reverse=True)[:3]
        assert [result["relevance_score"] for result in ranked] == pytest.approx(best, **CLOSE)
        status, text = refusal(server, "/v1/completions", prompt="x")
        assert (status, "classify" in text) == (400, True), text
        status, text = refusal(server, "/classify", input="word " * CONTEXT)
        assert (status, str(CONTEXT) in text) == (400, True), text


@pytest.mark.soak
def test_embeddings_of_the_official_client(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    with served("bert-mean", tmp_path) as server, server.client() as client:
        reference = pool.submit(pool_texts, str(tmp_path / "bert-mean"), "embed", [TEXTS], max_model_len=CONTEXT)
        answer = client.embeddings.create(model="bert-mean", input=TEXTS)
        for entry, expected in zip(answer.data, reference.result(), strict=True):
            assert entry.embedding == pytest.approx(expected, **CLOSE)
        short = client.embeddings.create(model="bert-mean", input=TEXTS[:1], dimensions=32).data[0].embedding
        assert len(short) == 32
        assert sum(value**2 for value in short) == pytest.approx(1.0, rel=1e-4)
        assert refusal(server, "/v1/embeddings", input="x", dimensions=33)[0] == 400


@pytest.mark.soak
def test_classes_of_a_decoder(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    with served("qwen3-classifier", tmp_path) as server:
        reference = pool.submit(
            pool_texts, str(tmp_path / "qwen3-classifier"), "classify", [TEXTS], max_model_len=CONTEXT
        )
        answer = post(server, "/classify", input=TEXTS)
        for entry, expected in zip(answer["data"], reference.result(), strict=True):
            assert entry["probs"] == pytest.approx(expected, **CLOSE)
            assert entry["label"] == ["bad", "so so", "good"][max(range(3), key=expected.__getitem__)]
