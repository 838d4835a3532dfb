"""Routes of models that embed, classify or score only: requests to the engine, answers, and refusals."""

import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from protocol.codec import unpack
from protocol.pooling import PoolingModel, PoolingParams
from protocol.requests import Embedding, EnginePhase, EngineState, GenerateRequest, RequestOutputs
from protocol.sampling import Pooling
from tests.integration.frontend.declared import check_answer
from tests.integration.frontend.scripted import TOKENIZER, VOCAB, Frontend, ScriptedScheduler, ended, scripted
from tests.integration.frontend.test_refusals import error_of

CONTEXT = 64
CLASSES = PoolingModel("classify", 3, True, ["bad", "so so"])
SCORER = PoolingModel("classify", 1, True)
LLM_SCORER = PoolingModel("classify", 1, separates_pairs=False)
EMBEDDER = PoolingModel("embed", 8, True, dimensions=[2, 8])
TAGGER = PoolingModel("token_classify", 2, True)
LATE = PoolingModel("token_embed", 2, True)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ instruction | default('') if m.role == 'query' }}{{ m.content }}"
    "{% endfor %}"
)


def values_of(request: GenerateRequest, model: PoolingModel) -> np.ndarray:
    """Return numbers that depend on the prompt."""
    ids, params = unpack(request.token_ids), request.pooling_params
    size = (params and params.dimensions) or model.size
    rows = len(ids) if model.is_tokenwise else 1
    return (np.arange(size * rows) % 5 + ids[-1] % 7 + len(ids)).astype(np.float32)


@contextmanager
def serving(model: PoolingModel, **config: str) -> Iterator[tuple[Frontend, ScriptedScheduler]]:
    def answer(request: GenerateRequest) -> list[RequestOutputs]:
        values = Embedding(request.number, values_of(request, model).tobytes())
        return [RequestOutputs(b"", b"", b"", embeddings=[values]), ended(request.number)]

    state = EngineState(
        EnginePhase.READY, max_model_len=CONTEXT, vocab_size=VOCAB, hidden_size=model.size, pooling=model
    )
    with scripted(state=state, served_model_name=["demo"], **config) as (frontend, engine):
        engine.script(answer)
        yield frontend, engine


def prompts(engine: ScriptedScheduler) -> list[list[int]]:
    assert {request.pooling for request in engine.requests} == {Pooling.MODEL}
    return [unpack(request.token_ids).tolist() for request in engine.requests]


def test_classes_have_labels_and_probabilities() -> None:
    with serving(CLASSES) as (frontend, engine):
        ids = TOKENIZER.encode("one two three")
        answer = frontend.post("/classify", {"input": ["one", "one two three"], "use_activation": False})
        check_answer("/classify", False, answer.text)
        body = answer.json()
        for entry, request in zip(body["data"], engine.requests, strict=True):
            values = values_of(request, CLASSES).tolist()
            label = [*CLASSES.labels, None][int(np.argmax(values))]
            assert (entry["probs"], entry["num_classes"], entry["label"]) == (values, 3, label)
        assert prompts(engine) == [TOKENIZER.encode("one"), ids]
        assert {request.pooling_params for request in engine.requests} == {PoolingParams(False)}
        assert body["usage"]["total_tokens"] == sum(map(len, prompts(engine)))
        by_ids = frontend.post("/classify", {"input": [ids]}).json()["data"][0]
        assert by_ids == body["data"][1] | {"index": 0}
        pooled = frontend.post("/pooling", {"input": "one", "task": "classify"}).json()["data"][0]
        assert pooled["data"] == body["data"][0]["probs"]


def test_a_whole_context_is_read_and_texts_are_cut_at_their_ends() -> None:
    with serving(CLASSES) as (frontend, engine):
        ids = [5 + i for i in range(CONTEXT + 9)]
        text = " ".join(["word"] * (CONTEXT + 9))
        assert error_of(frontend.post("/classify", {"input": ids}), 400)["param"] == "input"
        for given, side in ((ids[:CONTEXT], None), (ids, None), (ids, "left"), (text, None)):
            body = {"input": given, "truncate_prompt_tokens": -1, "truncation_side": side}
            assert frontend.post("/classify", body).status_code == 200
        assert prompts(engine) == [
            ids[:CONTEXT], ids[:CONTEXT], ids[-CONTEXT:], TOKENIZER.encode(text)[:CONTEXT],
        ]  # fmt: skip


def separated(query: str, document: str) -> list[int]:
    return TOKENIZER.encode_texts(query, document, True, None)[0]


def concatenated(query: str, document: str) -> list[int]:
    return TOKENIZER.encode(query + document)


@pytest.mark.parametrize(("model", "encode"), [(SCORER, separated), (LLM_SCORER, concatenated)])
def test_pairs_are_one_prompt(model: PoolingModel, encode: Callable[[str, str], list[int]]) -> None:
    with serving(model) as (frontend, engine):
        answer = frontend.post("/score", {"queries": "one", "documents": ["two words", "x"]})
        check_answer("/score", False, answer.text)
        assert prompts(engine) == [encode("one", "two words"), encode("one", "x")]
        scores = [float(values_of(request, model)[0]) for request in engine.requests]
        assert [entry["score"] for entry in answer.json()["data"]] == scores
        ranked = frontend.post("/v2/rerank", {"query": "one", "documents": ["two words", "x"], "top_n": 1}).json()
        best = int(np.argmax(scores))
        assert [(r["index"], r["relevance_score"]) for r in ranked["results"]] == [(best, scores[best])]


def test_pairs_use_the_template_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "pairs.jinja").write_text(TEMPLATE)
    with serving(LLM_SCORER, chat_template=str(tmp_path / "pairs.jinja")) as (frontend, engine):
        body = {"text_1": "one", "text_2": ["two", "x"], "instruction": "judge: "}
        assert frontend.post("/score", body).status_code == 200
        assert prompts(engine) == [TOKENIZER.encode(f"<query>judge: one<document>{text}") for text in ("two", "x")]


def test_embeddings_are_those_of_the_model() -> None:
    with serving(EMBEDDER) as (frontend, engine):
        with frontend.client() as client:
            answer = client.embeddings.create(model="demo", input="one", dimensions=2, encoding_format="float")
        [request] = engine.requests
        assert request.pooling_params == PoolingParams(None, 2)
        assert answer.data[0].embedding == values_of(request, EMBEDDER).tolist()
        assert error_of(frontend.post("/v1/embeddings", {"input": "x", "dimensions": 3}), 400)["param"] == "dimensions"
        cosine = frontend.post("/score", {"text_1": "one", "text_2": "one"}).json()["data"][0]["score"]
        assert cosine == pytest.approx(1.0)


def test_each_token_has_numbers() -> None:
    with serving(TAGGER) as (frontend, engine):
        answer = frontend.post("/pooling", {"input": "one two"})
        check_answer("/pooling", False, answer.text)
        [request] = engine.requests
        expected = values_of(request, TAGGER).reshape(-1, 2)
        assert answer.json()["data"][0]["data"] == expected.tolist()
        packed = frontend.post("/pooling", {"input": "one two", "encoding_format": "base64"}).json()["data"][0]["data"]
        assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == expected.ravel().tolist()


def test_each_token_of_a_query_finds_its_best_in_a_document() -> None:
    with serving(LATE) as (frontend, engine):
        score = frontend.post("/score", {"text_1": "one", "text_2": "two words"}).json()["data"][0]["score"]
        query, document = (values_of(request, LATE).reshape(-1, 2) for request in engine.requests)
        assert score == pytest.approx(float((query @ document.T).max(axis=1).sum()))


@pytest.mark.parametrize(
    ("model", "path", "body", "param"),
    [
        (CLASSES, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "model"),
        (CLASSES, "/v1/completions", {"prompt": "x"}, "model"),
        (CLASSES, "/v1/responses", {"input": "x"}, "model"),
        (CLASSES, "/v1/embeddings", {"input": "x"}, "model"),
        (CLASSES, "/score", {"text_1": "x", "text_2": "y"}, "model"),
        (CLASSES, "/pooling", {"input": "x", "task": "embed"}, "task"),
        (CLASSES, "/classify", {"input": ""}, "input"),
        (CLASSES, "/classify", {"input": [1, VOCAB]}, "input"),
        (CLASSES, "/classify", {"input": {"a": 1}}, "input"),
        (CLASSES, "/classify", {"input": "x", "dimensions": 2}, "dimensions"),
        (EMBEDDER, "/classify", {"input": "x"}, "model"),
        (TAGGER, "/rerank", {"query": "x", "documents": ["y"]}, "model"),
        (SCORER, "/rerank", {"query": "x", "documents": ["y"], "instruction": "z"}, "instruction"),
    ],
)
def test_what_a_model_cannot_do_is_refused_by_name(
    model: PoolingModel, path: str, body: dict[str, object], param: str
) -> None:
    with serving(model) as (frontend, engine):
        assert error_of(frontend.post(path, body), 400)["param"] == param
        assert engine.requests == []
