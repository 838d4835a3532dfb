"""/v1/embeddings: each input is an engine request that ends with an embedding."""

import base64
import contextlib
import time
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request as HTTPRequest

from protocol.requests import Finish
from protocol.sampling import SamplingParams
from services.frontend.context import AppContext
from services.frontend.engine.client import EngineClient, RequestContext, failure
from services.frontend.engine.streams import RawLogprobs, RequestStream, ResponseStream, Token
from services.frontend.errors import APIError, invalid
from services.frontend.http.disconnect import watch_disconnect
from services.frontend.metrics import AnswerRecord, Metrics
from services.frontend.openai.parameters.sampling import too_long
from services.frontend.openai.prompts.encoder import (
    PromptEncoder,
    checked_ids,
    least_tokens,
    separate_prompts,
)
from services.frontend.openai.schemas.requests import EmbeddingRequest
from services.frontend.openai.schemas.responses import AnswerHead, EmbeddingEntry, EmbeddingUsage
from services.frontend.text.tokenizer import Tokenizer

MAX_OPEN = 64
"""Inputs of one body that are open in the engine at once, so that a long list does not delay other requests."""
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True)
class EmbeddingFormat:
    """The form in which the client gets its embeddings."""

    dimensions: int
    as_base64: bool

    @classmethod
    def from_body(cls, body: EmbeddingRequest, hidden_size: int) -> "EmbeddingFormat":
        """Raises: APIError"""
        if not hidden_size:
            raise invalid("this server gives no embeddings; its backend computes none", "model")
        dimensions = body.dimensions or hidden_size
        if dimensions > hidden_size:
            raise invalid(
                f"dimensions is {dimensions}, but this model's embeddings have {hidden_size}", "dimensions"
            )
        return cls(dimensions, body.encoding_format == "base64")

    def encode(self, index: int, values: NDArray[np.float32]) -> bytes:
        """Return the JSON of one entry of `data`.

        Args:
            values: float32[hidden size], not normalised.

        Raises: APIError
        """
        entry: EmbeddingEntry = {"object": "embedding", "index": index, "embedding": self.value(values)}
        return msgspec.json.encode(entry)

    def value(self, values: NDArray[np.float32]) -> str | list[float]:
        """Return the embedding in the client's form. Raises: APIError"""
        unit = normalised(values[: self.dimensions])
        if not self.as_base64:
            numbers: list[float] = unit.tolist()
            return numbers
        return base64.b64encode(unit.astype("<f4").tobytes()).decode()  # as the official client reads it


def normalised(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return float32 of L2 norm 1; zeros stay zeros. Raises: APIError, if a number is not finite"""
    exact = values.astype(np.float64)  # its square cannot overflow
    if not np.isfinite(exact).all():
        raise APIError(500, "the model gave an embedding that is no finite number")
    length = float(np.sqrt(exact @ exact))
    return (exact / (length or 1.0)).astype(np.float32)


async def token_ids(
    body: EmbeddingRequest, encoder: PromptEncoder, tokenizer: Tokenizer, vocab_size: int, max_model_len: int
) -> list[list[int]]:
    """Return the token ids of each input, at least one each. Raises: APIError"""
    inputs = separate_prompts(body.input)
    if not inputs or not all(inputs):
        raise invalid("an input is empty", "input")
    longest = max_model_len - 1  # the engine reserves a position for an output token
    keep = longest if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    if keep == 0:
        raise invalid("truncate_prompt_tokens leaves nothing of the input", "truncate_prompt_tokens")
    found = []
    for given in inputs:
        if isinstance(given, str):
            if keep is None and (least := least_tokens(given, tokenizer)) > longest:
                raise too_long(least, max_model_len, "input", at_least=True)
            ids = await encoder.encode(given, body.add_special_tokens is not False)
        else:
            ids = given
        checked_ids(ids, vocab_size, "input")
        found.append(ids if keep is None else ids[-keep:])
        if len(found[-1]) > longest:
            raise too_long(len(found[-1]), max_model_len, "input")
    return found


class EntryFormat(Protocol):
    def encode(self, index: int, values: NDArray[np.float32]) -> bytes:
        """Return one entry of the answer. Raises: APIError"""
        ...


class EmbeddingStream(RequestStream):
    __slots__ = ("_embedder", "index", "values")

    def __init__(self, response: ResponseStream, embedder: "Embedder", index: int) -> None:
        super().__init__(response)
        self._embedder = embedder
        self.index = index
        self.values: bytes | None = None
        """float32[hidden size]"""

    def add_logprobs(self, logprobs: RawLogprobs) -> None:
        """Ignored, as none are requested."""

    def add_embedding(self, values: bytes) -> None:
        self.values = values
        self.response.mark_due(self)

    def feed(self, tokens: list[Token], end: Finish | None, now: float) -> bytes:
        if self.values is not None:
            self._embedder.add(self.index, self.values)
            self.values = None
        if end is not None:
            if (error := failure(end)) is not None:
                raise error
            self._embedder.on_end(self, end, now)
            self.has_ended = True
        return b""


class Embedder:
    """Submits the inputs of one HTTP request, at most `MAX_OPEN` at once. The caller must close it."""

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        format: EntryFormat,
        request: RequestContext,
        prompts: list[list[int]],
    ) -> None:
        self.response = ResponseStream(engine.flush_queue, request.request_id)
        self._engine = engine
        self._metrics = metrics
        self._format = format
        self._request = request
        self._prompts = prompts
        self._entries: list[bytes | None] = [None] * len(prompts)
        """Each encoded entry; None until it has arrived."""
        self._open: dict[int, EmbeddingStream] = {}
        self._num_submitted = 0
        self._started = time.monotonic()

    def close(self) -> None:
        """Abort the requests that are still open."""
        self._engine.abort(self._open.values())

    async def run(self) -> list[bytes]:
        """Return each prompt's encoded entry, in order. Raises: APIError"""
        for _ in self._prompts[:MAX_OPEN]:
            self._submit_next()
        await self.response.last()
        return [entry for entry in self._entries if entry is not None]

    def _submit_next(self) -> None:
        """Raises: APIError"""
        index = self._num_submitted
        stream = EmbeddingStream(self.response, self, index)
        self._engine.submit(stream, self._prompts[index], _ONE_TOKEN, self._request)
        self._open[index] = stream
        self._num_submitted += 1

    def add(self, index: int, values: bytes) -> None:
        """Raises: APIError"""
        self._entries[index] = self._format.encode(index, np.frombuffer(values, np.float32))

    def on_end(self, stream: EmbeddingStream, end: Finish, now: float) -> None:
        """Raises: APIError"""
        del self._open[stream.index]
        if self._entries[stream.index] is None:
            raise APIError(500, "the engine returned no embedding")
        prompt = self._prompts[stream.index]
        self._metrics.on_answer(AnswerRecord("stop", now - self._started, prompt_tokens=len(prompt), end=end))
        if self._num_submitted < len(self._prompts):
            self._submit_next()


async def embed(
    http: HTTPRequest, context: AppContext, body: EmbeddingRequest, format: EntryFormat
) -> tuple[list[bytes], int]:
    """Return the encoded embedding of each input, and the number of tokens. Raises: APIError"""
    state, answering = context.engine.state, context.answering
    EmbeddingFormat.from_body(body, state.hidden_size)  # refuses backends without embeddings
    sizes = state.vocab_size, state.max_model_len
    prompts = await token_ids(body, answering.prompts, context.model.tokenizer, *sizes)
    request = answering.context(http, body, pooling=context.model.pooling)
    http.state.summary.prompt_tokens = sum(map(len, prompts))
    embedder = Embedder(context.engine, context.metrics, format, request, prompts)
    with contextlib.closing(embedder), watch_disconnect(http.receive, embedder.response.fail):
        return await embedder.run(), sum(map(len, prompts))


def embedding_usage(num_tokens: int) -> EmbeddingUsage:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def embeddings_json(head: AnswerHead, entries: list[bytes], num_tokens: int) -> bytes:
    """Return the JSON of an answer whose entries are encoded."""
    data = [*map(msgspec.Raw, entries)]
    return msgspec.json.encode({"object": "list", **head, "data": data, "usage": embedding_usage(num_tokens)})
