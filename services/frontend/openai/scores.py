"""/score, /rerank and /pooling: vLLM's routes, from the embeddings of the model."""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from services.frontend.context import Context, recorded
from services.frontend.errors import ErrorResponse, invalid
from services.frontend.openai.embeddings import (
    EmbeddingFormat,
    embed,
    embedding_usage,
    embeddings_json,
    normalised,
)
from services.frontend.openai.schemas.fields import MAX_INPUTS, Text
from services.frontend.openai.schemas.open_object import OpenObject
from services.frontend.openai.schemas.requests import EmbeddingRequest, ScheduledRequest
from services.frontend.openai.schemas.responses import (
    PoolingEntry,
    PoolingResponse,
    RerankResponse,
    RerankResult,
    ScoreResponse,
)
from services.frontend.openapi import WITH_BODY, errors, read_by_handler

Texts = Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS // 2, fail_fast=True)]
_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
_TEXTS = {name for pair in _PAIRS for name in pair}


class _Scored(ScheduledRequest):
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=2**31)
    """Number of tokens to keep at the end of each text; -1: as many as the context holds."""

    def embedding_request(self, texts: list[str]) -> EmbeddingRequest:
        return EmbeddingRequest(
            input=texts,
            model=self.model,
            priority=self.priority,
            cache_salt=self.cache_salt,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


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
                f"{pair[0]} has {len(first)} texts and {pair[1]} has {len(second)}; "
                "give one, or as many as the other",
                pair[0],
            )
        return first, second


class RerankDocument(OpenObject):
    text: Text


class RerankRequest(_Scored):
    query: Text
    documents: Annotated[
        list[Text | RerankDocument], Field(min_length=1, max_length=MAX_INPUTS - 1, fail_fast=True)
    ]
    top_n: int | None = Field(None, ge=0, lt=2**31)
    """Number of results; 0 or null: all."""
    return_documents: bool | None = True


def _listed(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


@dataclass(frozen=True)
class _Vectors:
    """Keeps embeddings as bytes of float32, normalised."""

    def encode(self, index: int, values: NDArray[np.float32]) -> bytes:
        return normalised(values).tobytes()


@dataclass(frozen=True)
class _PoolingFormat:
    format: EmbeddingFormat

    def encode(self, index: int, values: NDArray[np.float32]) -> bytes:
        entry: PoolingEntry = {"object": "pooling", "index": index, "data": self.format.value(values)}
        return msgspec.json.encode(entry)


router = APIRouter(responses=errors(*WITH_BODY))
_SCORED: Any = {
    "summary": "Compares texts by the cosine of their embeddings",
    "response_model": ScoreResponse,
    "openapi_extra": read_by_handler(ScoreRequest),
}
_RERANKED: Any = {
    "summary": "Orders documents by the cosine of their embeddings and that of a query",
    "response_model": RerankResponse,
    "openapi_extra": read_by_handler(RerankRequest),
}


@router.post(
    "/classify",
    summary="Refused: served models have no classes",
    status_code=400,
    response_model=ErrorResponse,
)
async def classify() -> None:
    raise invalid("this server does not classify; /score compares texts, and a chat can choose among words")


@router.post("/score", **_SCORED)
@router.post("/v1/score", **_SCORED)
@recorded
async def score(http: HTTPRequest, context: Context) -> Response:
    body = await context.bodies.parse(http, ScoreRequest)
    context.answering.check(body.model)
    first, second = body.pairs()
    given = body.embedding_request([*first, *second])
    vectors, count = await embed(http, context, given, _Vectors())
    scores = cosines(vectors[: len(first)], vectors[len(first) :])
    answer: ScoreResponse = {
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
    context.answering.check(body.model)
    texts = [given if isinstance(given, str) else given.text for given in body.documents]
    vectors, count = await embed(http, context, body.embedding_request([body.query, *texts]), _Vectors())
    scores = cosines(vectors[:1], vectors[1:])
    results: list[RerankResult] = []
    for i in sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n or None]:
        results.append({"index": i, "relevance_score": scores[i]})
        if body.return_documents is not False:
            results[-1]["document"] = {"text": texts[i]}
    head = context.answering.head(body, "rerank")
    answer: RerankResponse = {
        "id": head["id"],
        "model": head["model"],
        "usage": embedding_usage(count),
        "results": results,
    }
    return Response(msgspec.json.encode(answer), media_type="application/json")


@router.post(
    "/pooling",
    summary="Computes normalised embeddings of texts",
    response_model=PoolingResponse,
    openapi_extra=read_by_handler(EmbeddingRequest),
)
@recorded
async def pooling(http: HTTPRequest, context: Context) -> Response:
    body = await context.bodies.parse(http, EmbeddingRequest)
    context.answering.check(body.model)
    format = EmbeddingFormat.from_body(body, context.engine.state.hidden_size)
    entries, count = await embed(http, context, body, _PoolingFormat(format))
    content = embeddings_json(context.answering.head(body, "pool"), entries, count)
    return Response(content, media_type="application/json")


def cosines(first: list[bytes], second: list[bytes]) -> list[float]:
    """Return the cosine of each pair of normalised float32 vectors; one first vector is paired with all second ones."""
    left, right = (
        np.array([np.frombuffer(v, np.float32) for v in side], np.float64) for side in (first, second)
    )
    return [float(value) for value in np.clip((left * right).sum(axis=1), -1.0, 1.0)]
