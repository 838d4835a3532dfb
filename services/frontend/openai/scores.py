"""/score, /rerank and /pooling: vLLM's routes, from the embeddings of the model."""

import contextlib
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import FastAPI
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from services.frontend.errors import invalid
from services.frontend.http.disconnect import watch_disconnect
from services.frontend.openai.answering import Answering
from services.frontend.openai.embeddings import Embedder, EmbeddingFormat, normalised, token_ids
from services.frontend.openai.parameters.body import BodyParser
from services.frontend.openai.schemas.requests import MAX_INPUTS, BaseRequest, EmbeddingRequest, Text

Texts = Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS // 2, fail_fast=True)]
_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))


class _Scored(BaseRequest):
    priority: int | None = Field(0, ge=-(2**20), le=2**20)
    """Lower values run earlier under the `priority` scheduling policy."""
    cache_salt: str | None = Field(None, max_length=256)
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
    data_1: Texts | None = None
    data_2: Texts | None = None

    def pairs(self) -> tuple[list[str], list[str]]:
        """Return two lists; the first has one text, or as many as the second. Raises: APIError"""
        given = [pair for pair in _PAIRS if any(getattr(self, name) is not None for name in pair)]
        if len(given) != 1 or any(getattr(self, name) is None for name in given[0]):
            raise invalid("two texts are needed, under the names text_1 and text_2", "text_1")
        first, second = (_listed(getattr(self, name)) for name in given[0])
        if len(first) not in (1, len(second)):
            raise invalid(
                f"{given[0][0]} has {len(first)} texts and {given[0][1]} has {len(second)}; "
                "give one, or as many as the other",
                given[0][0],
            )
        return first, second


class RerankDocument(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
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
class _PoolingEntry:
    format: EmbeddingFormat

    def encode(self, index: int, values: NDArray[np.float32]) -> bytes:
        return msgspec.json.encode({"object": "pooling", "index": index, "data": self.format.value(values)})


class ScoreEndpoints:
    """Handlers of the endpoints."""

    def __init__(self, answering: Answering, bodies: BodyParser) -> None:
        self._answering = answering
        self._bodies = bodies

    def add_to(self, app: FastAPI) -> None:
        for path in ("/score", "/v1/score"):
            app.post(path)(self.score)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            app.post(path)(self.rerank)
        app.post("/pooling")(self.pooling)
        app.post("/classify")(self.classify)

    async def score(self, http: HTTPRequest) -> Response:
        return await self._answering.recorded(http, self._score(http))

    async def rerank(self, http: HTTPRequest) -> Response:
        return await self._answering.recorded(http, self._rerank(http))

    async def pooling(self, http: HTTPRequest) -> Response:
        return await self._answering.recorded(http, self._pool(http))

    async def classify(self, http: HTTPRequest) -> Response:
        raise invalid(
            "this server does not classify; /score compares texts, and a chat can choose among words"
        )

    async def _score(self, http: HTTPRequest) -> Response:
        body = await self._bodies.parse(http, ScoreRequest)
        self._answering.check(body.model)
        first, second = body.pairs()
        vectors, count = await self._embedded(http, body.embedding_request([*first, *second]), _Vectors())
        scores = cosines(vectors[: len(first)], vectors[len(first) :])
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
        return _response(
            {**self._answering.head(body, "score", "list"), "data": data, "usage": _usage(count)}
        )

    async def _rerank(self, http: HTTPRequest) -> Response:
        body = await self._bodies.parse(http, RerankRequest)
        self._answering.check(body.model)
        texts = [given if isinstance(given, str) else given.text for given in body.documents]
        vectors, count = await self._embedded(http, body.embedding_request([body.query, *texts]), _Vectors())
        scores = cosines(vectors[:1], vectors[1:])
        order = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n or None]
        shown = body.return_documents is not False
        results = [
            {"index": i, "relevance_score": scores[i], **({"document": {"text": texts[i]}} if shown else {})}
            for i in order
        ]
        head = self._answering.head(body, "rerank", "list")
        return _response(
            {"id": head["id"], "model": head["model"], "usage": _usage(count), "results": results}
        )

    async def _pool(self, http: HTTPRequest) -> Response:
        body = await self._bodies.parse(http, EmbeddingRequest)
        self._answering.check(body.model)
        format = EmbeddingFormat.from_body(body, self._answering.engine.state.hidden_size)
        entries, count = await self._embedded(http, body, _PoolingEntry(format))
        head = self._answering.head(body, "pool", "list")
        return _response({**head, "data": [*map(msgspec.Raw, entries)], "usage": _usage(count)})

    async def _embedded(
        self, http: HTTPRequest, body: EmbeddingRequest, format: "_Vectors | _PoolingEntry"
    ) -> tuple[list[bytes], int]:
        """Return the encoded embedding of each input, and the number of tokens. Raises: APIError"""
        answering, state = self._answering, self._answering.engine.state
        EmbeddingFormat.from_body(body, state.hidden_size)  # refuses backends without embeddings
        sizes = state.vocab_size, state.max_model_len
        prompts = await token_ids(body, answering.prompts, answering.model.tokenizer, *sizes)
        request = answering.context(http, body, pooling=answering.model.pooling)
        http.state.summary.prompt_tokens = sum(map(len, prompts))
        embedder = Embedder(answering.engine, answering.metrics, format, request, prompts)
        with contextlib.closing(embedder), watch_disconnect(http.receive, embedder.response.fail):
            return await embedder.run(), sum(map(len, prompts))


def cosines(first: list[bytes], second: list[bytes]) -> list[float]:
    """Return the cosine of each pair of normalised float32 vectors; one first vector is paired with all second ones."""
    left, right = (
        np.array([np.frombuffer(v, np.float32) for v in side], np.float64) for side in (first, second)
    )
    return [float(value) for value in np.clip((left * right).sum(axis=1), -1.0, 1.0)]


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _response(content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
