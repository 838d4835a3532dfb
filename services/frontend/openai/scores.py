"""/classify, /score, /rerank and /pooling: vLLM's routes, from embeddings of the model or from its own pooler."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from protocol.pooling import PoolingParams
from services.frontend.context import AppContext, Context, recorded
from services.frontend.errors import invalid
from services.frontend.openai.embeddings import (
    EmbeddingFormat,
    Given,
    embed,
    embedding_usage,
    finite,
    normalised,
    pooled,
    read_prompt,
)
from services.frontend.openai.schemas import responses
from services.frontend.openai.schemas.fields import MAX_INPUTS, TemplateVariables, Text
from services.frontend.openai.schemas.open_object import OpenObject
from services.frontend.openai.schemas.requests import PoolingRequest, TextsRequest, VectorsRequest
from services.frontend.openai.tasks import GENERATE, check_task
from services.frontend.openapi import WITH_BODY, errors, read_by_handler

Texts = Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS // 2, fail_fast=True)]
_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
_TEXTS = {name for pair in _PAIRS for name in pair}


class _Scored(VectorsRequest):
    instruction: Text | None = None
    """Variable of the template for pairs (`--chat-template`)."""
    chat_template_kwargs: TemplateVariables | None = None
    """Other variables of that template."""


class ScoreRequest(_Scored):
    """Two texts or lists of texts, under one of vLLM's pairs of names. One text is compared with each of a list."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    def pairs(self) -> tuple[list[str], list[str]]:
        """Return two lists; the first has one text, or as many as the second. Raises: APIError"""
        given = {name for name in _TEXTS if getattr(self, name) is not None}
        pair = next((pair for pair in _PAIRS if given == set(pair)), None)
        if pair is None:
            raise invalid("two texts are needed, under the names text_1 and text_2", "text_1")
        first, second = (_listed(getattr(self, name)) for name in pair)
        if len(first) not in (1, len(second)):
            raise invalid(
                f"{pair[0]} has {len(first)} texts and {pair[1]} has {len(second)}; give one, or as many as the other",
                pair[0],
            )
        return first, second


class RerankDocument(OpenObject):
    text: Text


class RerankRequest(_Scored):
    query: Text
    documents: Annotated[list[Text | RerankDocument], Field(min_length=1, max_length=MAX_INPUTS - 1, fail_fast=True)]
    top_n: int | None = Field(None, ge=0, lt=2**31)
    """Number of results; 0 or null: all."""
    return_documents: bool | None = True


def _listed(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


def _vector(normalises: bool, _index: int, values: NDArray[np.float32]) -> bytes:
    """Return a vector as bytes of float32."""
    return (normalised(values) if normalises else finite(values)).tobytes()


def _class_entry(labels: Sequence[str], index: int, values: NDArray[np.float32]) -> bytes:
    best = int(finite(values).argmax())
    label = (labels[best] or None) if best < len(labels) else None
    entry: responses.ClassificationEntry = {
        "index": index, "label": label, "probs": values.tolist(), "num_classes": len(values),
    }  # fmt: skip
    return msgspec.json.encode(entry)


def _pooling_entry(format: EmbeddingFormat, is_tokenwise: bool, index: int, values: NDArray[np.float32]) -> bytes:
    if is_tokenwise:
        data = format.numbers(finite(values).reshape(-1, format.dimensions))
    else:
        data = format.value(values)
    entry: responses.PoolingEntry = {"object": "pooling", "index": index, "data": data}
    return msgspec.json.encode(entry)


router = APIRouter(responses=errors(*WITH_BODY))
_SCORED: Any = {
    "summary": "Compares texts: by their embeddings, or by a model that scores pairs",
    "response_model": responses.ScoreResponse,
    "openapi_extra": read_by_handler(ScoreRequest),
}
_RERANKED: Any = {
    "summary": "Orders documents by their scores with a query",
    "response_model": responses.RerankResponse,
    "openapi_extra": read_by_handler(RerankRequest),
}


@router.post(
    "/classify",
    summary="Computes the classes of texts",
    response_model=responses.ClassificationResponse,
    openapi_extra=read_by_handler(TextsRequest),
)
@recorded
async def classify(http: HTTPRequest, context: Context) -> Response:
    body, model = await context.bodies.parse(http, TextsRequest), context.engine.state.pooling
    context.answering.check(body.model, generates=False)
    check_task(model, "classify")
    assert model is not None, "check_task refuses a model that generates text"
    encode, params = partial(_class_entry, model.labels), PoolingParams(body.use_activation)
    return await embed(http, context, body, "classify", encode, params)


@router.post("/score", **_SCORED)
@router.post("/v1/score", **_SCORED)
@recorded
async def score(http: HTTPRequest, context: Context) -> Response:
    body = await context.bodies.parse(http, ScoreRequest)
    scores, count = await _scores(http, context, body, *body.pairs())
    answer: responses.ScoreResponse = {
        "object": "list",
        **context.answering.head(body, "score"),
        "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)],
        "usage": embedding_usage(count),
    }
    return Response(msgspec.json.encode(answer), media_type="application/json")


@router.post("/rerank", **_RERANKED)
@router.post("/v1/rerank", **_RERANKED)
@router.post("/v2/rerank", **_RERANKED)
@recorded
async def rerank(http: HTTPRequest, context: Context) -> Response:
    body = await context.bodies.parse(http, RerankRequest)
    texts = [given if isinstance(given, str) else given.text for given in body.documents]
    scores, count = await _scores(http, context, body, [body.query], texts)
    results: list[responses.RerankResult] = []
    for i in sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n or None]:
        results.append({"index": i, "relevance_score": scores[i]})
        if body.return_documents is not False:
            results[-1]["document"] = {"text": texts[i]}
    head = context.answering.head(body, "rerank")
    answer: responses.RerankResponse = {
        "id": head["id"],
        "model": head["model"],
        "usage": embedding_usage(count),
        "results": results,
    }
    return Response(msgspec.json.encode(answer), media_type="application/json")


@router.post(
    "/pooling",
    summary="Computes embeddings or classes of texts or of their tokens, as the model is served",
    response_model=responses.PoolingResponse,
    openapi_extra=read_by_handler(PoolingRequest),
)
@recorded
async def pooling(http: HTTPRequest, context: Context) -> Response:
    body, state = await context.bodies.parse(http, PoolingRequest), context.engine.state
    context.answering.check(body.model, generates=False)
    served = "embed" if state.pooling is None else state.pooling.task
    if body.task not in (None, served):
        raise invalid(f"task is {body.task}, but this model is served for {served}", "task")
    format = EmbeddingFormat.from_body(body, state)
    encode = partial(_pooling_entry, format, served.startswith("token_"))
    return await embed(http, context, body, "pool", encode, format.params)


async def _scores(
    http: HTTPRequest, context: AppContext, body: _Scored, first: list[str], second: list[str]
) -> tuple[list[float], int]:
    """Return the score of each pair, one first text with all second ones, and the number of tokens. Raises: APIError"""
    context.answering.check(body.model, generates=False)
    model, template = context.engine.state.pooling, context.model.pair_template
    check_task(model, GENERATE, "embed", "token_embed", "classify")
    scores_pairs = model is not None and model.task == "classify"
    if model is not None and scores_pairs and model.size != 1:
        raise invalid(f"this model has {model.size} classes, and only one with one class gives scores", "model")
    if not (scores_pairs and template):
        for name in ("instruction", "chat_template_kwargs"):
            if getattr(body, name):
                raise invalid(f"{name}: there is no template for pairs; start with --chat-template", name)
    if not all(first) or not all(second):
        raise invalid("an input is empty", "input")
    given: list[Given] = [*first, *second]
    if model is not None and scores_pairs:
        pairs = [(first[0] if len(first) == 1 else first[i], text) for i, text in enumerate(second)]
        if template:
            variables = {"instruction": body.instruction} if body.instruction is not None else {}
            variables |= body.chat_template_kwargs or {}
            given = [await context.answering.prompts.rendered_pair(*pair, variables) for pair in pairs]
        else:
            given = [*pairs] if model.separates_pairs else ["".join(pair) for pair in pairs]
    prompts = [await read_prompt(context, prompt, body) for prompt in given]
    normalises = model is None or model.task == "embed"
    params = PoolingParams(body.use_activation)
    vectors, count = await pooled(http, context, body, prompts, partial(_vector, normalises), params)
    values = [np.frombuffer(vector, np.float32) for vector in vectors]
    if scores_pairs:
        return [float(value[0]) for value in values], count
    left, right = values[: len(first)] * (len(second) if len(first) == 1 else 1), values[len(first) :]
    pairs_of_vectors = zip(left, right, strict=True)
    if normalises:
        return [cosine(*pair) for pair in pairs_of_vectors], count
    size = context.engine.state.hidden_size
    return [most_similar(a.reshape(-1, size), b.reshape(-1, size)) for a, b in pairs_of_vectors], count


def cosine(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """Return the cosine of two normalised vectors."""
    return float(np.clip(first.astype(np.float64) @ second, -1.0, 1.0))


def most_similar(query: NDArray[np.float32], document: NDArray[np.float32]) -> float:
    """Return the sum over the query's tokens of each one's best product with a token of the document."""
    return float((query @ document.T).max(axis=1).sum())
