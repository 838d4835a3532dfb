"""/score, /rerank, /pooling and /classify: answers from embeddings, and refusals."""

import base64

import numpy as np
import pytest

from tests.integration.frontend.declared import check_answer
from tests.integration.frontend.scripted import TOKENIZER, Frontend, ScriptedScheduler
from tests.integration.frontend.test_embeddings import states, unit
from tests.integration.frontend.test_refusals import error_of

QUERY, TEXTS = "one", ["three four five six", "one", "two words"]


def cosines_of(engine: ScriptedScheduler) -> list[float]:
    """Return the cosines of the first request's embedding and each of the others."""
    by_prompt = [unit(states(request).astype(np.float64)) for request in engine.requests]
    return [float(by_prompt[0] @ other) for other in by_prompt[1:]]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_one_text_is_compared_with_each(
    embedder: Frontend, engine: ScriptedScheduler, path: str, names: tuple[str, str]
) -> None:
    answer = embedder.post(path, {names[0]: QUERY, names[1]: TEXTS, "priority": -3}).json()
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(cosines_of(engine))
    assert answer["data"][1]["score"] == pytest.approx(1.0)
    assert answer["usage"]["prompt_tokens"] == sum(len(TOKENIZER.encode(text)) for text in [QUERY, *TEXTS])
    assert {request.priority for request in engine.requests} == {-3}


def test_lists_of_equal_length_are_compared_in_pairs(embedder: Frontend, engine: ScriptedScheduler) -> None:
    answer = embedder.post("/score", {"text_1": TEXTS, "text_2": TEXTS}).json()
    assert [entry["score"] for entry in answer["data"]] == pytest.approx([1.0] * 3)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ordered(embedder: Frontend, engine: ScriptedScheduler, path: str) -> None:
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    answer = embedder.post(path, {"query": QUERY, "documents": documents, "top_n": 2}).json()
    scores = cosines_of(engine)
    best, second = answer["results"]
    assert (best["index"], best["document"]) == (1, {"text": "one"})
    assert second["relevance_score"] == pytest.approx(max(scores[0], scores[2]))
    bare = embedder.post(path, {"query": QUERY, "documents": documents, "return_documents": False}).json()
    assert [set(result) for result in bare["results"]] == [{"index", "relevance_score"}] * 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/score", {"text_1": QUERY, "text_2": TEXTS}),
        ("/rerank", {"query": QUERY, "documents": TEXTS}),
        ("/pooling", {"input": TEXTS}),
        ("/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"}),
    ],
)
def test_answers_have_the_declared_fields(
    embedder: Frontend, engine: ScriptedScheduler, path: str, body: dict[str, object]
) -> None:
    check_answer(path, False, embedder.post(path, body).text)


def test_pooling_is_the_embedding(embedder: Frontend, engine: ScriptedScheduler) -> None:
    answer = embedder.post("/pooling", {"input": ["x"]}).json()
    embedded = embedder.post("/v1/embeddings", {"input": ["x"]}).json()
    assert answer["data"][0]["data"] == embedded["data"][0]["embedding"]
    encoded = embedder.post("/pooling", {"input": "x", "encoding_format": "base64"}).json()["data"][0]["data"]
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == pytest.approx(answer["data"][0]["data"])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {}, "text_1"),
        ("/score", {"text_1": "x"}, "text_1"),
        ("/score", {"text_1": "x", "text_2": "y", "queries": "z"}, "text_1"),
        ("/score", {"queries": "x", "documents": "y", "items": "z"}, "text_1"),
        ("/score", {"text_1": "x", "text_2": "y", "instruction": "z"}, "instruction"),
        ("/rerank", {"query": "x", "documents": ["y"], "max_tokens_per_doc": 5}, "max_tokens_per_doc"),
        ("/score", {"text_1": ["x", "y"], "text_2": ["x", "y", "z"]}, "text_1"),
        ("/score", {"text_1": "x", "text_2": []}, "text_2"),
        ("/score", {"text_1": "", "text_2": "x"}, "input"),
        ("/rerank", {"query": "x"}, "documents"),
        ("/rerank", {"query": "x", "documents": []}, "documents"),
        ("/rerank", {"query": "x", "documents": ["x"], "top_n": -1}, "top_n"),
        ("/pooling", {}, "input"),
        ("/classify", {"input": "x"}, "model"),
    ],
)
def test_bad_field_is_refused(
    embedder: Frontend, engine: ScriptedScheduler, path: str, body: dict[str, object], param: str | None
) -> None:
    assert error_of(embedder.post(path, body), 400)["param"] == param
    assert engine.requests == []


def test_backend_without_embeddings_refuses_scores(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    error = error_of(frontend.post("/score", {"text_1": "x", "text_2": "y"}), 400)
    assert "embeddings" in str(error["message"])
