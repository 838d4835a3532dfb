"""Vectors of texts, for /v1/embeddings and others: each text is an engine request that ends with a vector."""

import base64
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from starlette.requests import Request as HTTPRequest

from protocol.pooling import PoolingParams
from protocol.requests import EngineState, Finish, GenerateRequest
from protocol.sampling import Pooling, SamplingParams
from services.frontend.context import AppContext
from services.frontend.engine.client import EngineClient, failure
from services.frontend.engine.streams import RawLogprobs, RequestStream, ResponseStream
from services.frontend.errors import APIError, invalid
from services.frontend.http.disconnect import watch_disconnect
from services.frontend.metrics import Metrics
from services.frontend.openai.parameters.sampling import too_long
from services.frontend.openai.prompts.encoder import checked_ids, least_tokens, separate_prompts
from services.frontend.openai.schemas.requests import EmbeddingRequest, ScheduledRequest, TextsRequest
from services.frontend.openai.schemas.responses import AnswerHead, EmbeddingEntry, EmbeddingUsage
from services.frontend.request_summary import EndedChoice

MAX_OPEN = 64
"""Inputs of one body that are open in the engine at once, so that a long list does not delay other requests."""
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True)
class EmbeddingFormat:
    """The form in which the client gets its embeddings."""

    dimensions: int
    as_base64: bool
    normalises: bool
    """False: the model's own pooler does, if the client wants it."""

    @classmethod
    def from_body(cls, body: EmbeddingRequest, state: EngineState) -> "EmbeddingFormat":
        """Raises: APIError"""
        size, model = _vector_size(state), state.pooling
        dimensions = body.dimensions or size
        if dimensions > size:
            raise invalid(f"dimensions is {dimensions}, but this model's embeddings have {size}", "dimensions")
        if model is not None and dimensions < size and not model.has_length(dimensions):
            lengths = " or ".join(map(str, model.dimensions or [size]))
            raise invalid(f"dimensions is {dimensions}, but this model's vectors have {lengths}", "dimensions")
        normalises = model is None and body.use_activation is not False
        return cls(dimensions, body.encoding_format == "base64", normalises)

    def encode(self, index: int, values: NDArray[np.float32]) -> bytes:
        """Return the JSON of one entry of `data`.

        Args:
            values: as in `Embedding`.

        Raises: APIError
        """
        entry: EmbeddingEntry = {"object": "embedding", "index": index, "embedding": self.value(values)}
        return msgspec.json.encode(entry)

    def value(self, values: NDArray[np.float32]) -> str | list[float]:
        """Return the embedding in the client's form. Raises: APIError"""
        given = finite(values[: self.dimensions])
        numbers: str | list[float] = self.numbers(normalised(given) if self.normalises else given)
        return numbers

    def numbers(self, values: NDArray[np.float32]) -> Any:
        """Return an array as base64 or as lists."""
        if self.as_base64:
            return base64.b64encode(values.astype("<f4").tobytes()).decode()  # as the official client reads it
        return values.tolist()


def _vector_size(state: EngineState) -> int:
    """Raises: APIError, if there are no vectors"""
    if not state.hidden_size:
        raise invalid("this server gives no embeddings; its backend computes none", "model")
    return state.hidden_size


def finite(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Raises: APIError, if a number is not finite"""
    if not np.isfinite(values).all():
        raise APIError(500, "the model gave an embedding that is no finite number")
    return values


def normalised(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return float32 of L2 norm 1; zeros stay zeros. Raises: APIError, if a number is not finite"""
    exact = finite(values).astype(np.float64)  # its square cannot overflow
    length = float(np.sqrt(exact @ exact))
    return (exact / (length or 1.0)).astype(np.float32)


class PooledPrompt(NamedTuple):
    token_ids: list[int]
    second_text: int | None = None
    """See `PoolingParams`."""


Encode = Callable[[int, NDArray[np.float32]], bytes]
"""Returns one entry of the answer from its index and its values. Raises: APIError"""
Given = str | list[int] | tuple[str, str]
"""A text, its token ids, or a pair of texts."""


@dataclass(frozen=True)
class PromptReader:
    """Encodes and truncates texts as the served model reads them."""

    context: AppContext
    keep: int | None
    """`truncate_prompt_tokens`"""
    side: str | None
    """`truncation_side`"""
    add_special_tokens: bool

    async def read(self, given: Given) -> PooledPrompt:
        """Return at least one token. Raises: APIError"""
        state, model, most = self.context.engine.state, self.context.model, self.keep
        context_length, generates = state.max_model_len, state.pooling is None
        longest = context_length - generates  # a token follows the prompt
        if most == 0:
            raise invalid("truncate_prompt_tokens leaves nothing of the input", "truncate_prompt_tokens")
        most = longest if most == -1 else most
        second = None
        if isinstance(given, list):
            ids = given
        else:
            first, other = given if isinstance(given, tuple) else (given, None)
            least = least_tokens(first + (other or ""), model.tokenizer) - (other is not None)
            if most is None and least > longest:
                raise too_long(least, context_length, "input", True, generates)
            # transformers cuts a text before it adds special tokens, and vLLM afterwards at a side that is given
            cut = most if not generates and self.side is None else None
            encode = self.context.answering.prompts.encode_texts
            ids, second = await encode(first, other, self.add_special_tokens, cut)
        checked_ids(ids, state.vocab_size, "input")
        if most is not None and len(ids) > most:
            keeps_end = self.side != "right" if generates else self.side == "left"
            cut = len(ids) - most if keeps_end else 0
            ids, second = ids[cut : cut + most], None if second is None else max(second - cut, 0)
        if not ids:
            raise invalid("an input is empty", "input")
        if len(ids) > longest:
            raise too_long(len(ids), context_length, "input", False, generates)
        return PooledPrompt(ids, second)


async def inputs_of(body: TextsRequest, context: AppContext) -> list[PooledPrompt]:
    """Return the prompt of each input. Raises: APIError"""
    inputs = separate_prompts(body.input)
    if not inputs or not all(inputs):
        raise invalid("an input is empty", "input")
    special = body.add_special_tokens is not False
    reader = PromptReader(context, body.truncate_prompt_tokens, body.truncation_side, special)
    return [await reader.read(given) for given in inputs]


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

    def feed(self, tokens: list[int], end: Finish | None, now: float) -> bytes:
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
        encode: Encode,
        shared: GenerateRequest,
        prompts: list[PooledPrompt],
    ) -> None:
        self.response = ResponseStream(engine.flush_queue, shared.request_id)
        self._engine = engine
        self._metrics = metrics
        self._encode = encode
        self._shared = shared
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
        stream, shared = EmbeddingStream(self.response, self, index), self._shared
        ids, second = self._prompts[index]
        if shared.pooling_params is not None and second is not None:
            shared = replace(shared, pooling_params=replace(shared.pooling_params, second_text=second))
        self._engine.submit(stream, ids, _ONE_TOKEN, shared)
        self._open[index] = stream
        self._num_submitted += 1

    def add(self, index: int, values: bytes) -> None:
        """Raises: APIError"""
        self._entries[index] = self._encode(index, np.frombuffer(values, np.float32))

    def on_end(self, stream: EmbeddingStream, end: Finish, now: float) -> None:
        """Raises: APIError"""
        del self._open[stream.index]
        if self._entries[stream.index] is None:
            raise APIError(500, "the engine returned no embedding")
        prompt = self._prompts[stream.index].token_ids
        self._metrics.on_answer(EndedChoice(self._started, None, now, "stop", end=end, prompt_tokens=len(prompt)))
        if self._num_submitted < len(self._prompts):
            self._submit_next()


async def pooled(
    http: HTTPRequest,
    context: AppContext,
    body: ScheduledRequest,
    prompts: list[PooledPrompt],
    encode: Encode,
    params: PoolingParams,
) -> tuple[list[bytes], int]:
    """Return the encoded vector of each prompt, and the number of tokens. `params`: for a model with a pooler of its
    own. Raises: APIError"""
    _vector_size(context.engine.state)
    kind = (context.model.pooling, None) if context.engine.state.pooling is None else (Pooling.MODEL, params)
    shared = context.answering.shared(http, body, pooling=kind[0], pooling_params=kind[1])
    http.state.summary.prompt_tokens = count = sum(len(prompt.token_ids) for prompt in prompts)
    embedder = Embedder(context.engine, context.metrics, encode, shared, prompts)
    with contextlib.closing(embedder), watch_disconnect(http.receive, embedder.response.fail):
        return await embedder.run(), count


async def embed(
    http: HTTPRequest, context: AppContext, body: EmbeddingRequest, encode: Encode
) -> tuple[list[bytes], int]:
    """Return the encoded vector of each input, and the number of tokens. Raises: APIError"""
    params = PoolingParams(body.use_activation, body.dimensions or 0)
    return await pooled(http, context, body, await inputs_of(body, context), encode, params)


def embedding_usage(num_tokens: int) -> EmbeddingUsage:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def embeddings_json(head: AnswerHead, entries: list[bytes], num_tokens: int) -> bytes:
    """Return the JSON of an answer whose entries are encoded."""
    data = [*map(msgspec.Raw, entries)]
    return msgspec.json.encode({"object": "list", **head, "data": data, "usage": embedding_usage(num_tokens)})
