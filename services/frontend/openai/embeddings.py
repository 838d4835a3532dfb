"""Vectors of texts, for /v1/embeddings and others: each text is an engine request that ends with a vector."""

import asyncio
import base64
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from protocol.pooling import PoolingParams
from protocol.requests import EngineState, Finish, GenerateRequest
from protocol.sampling import Pooling, SamplingParams
from services.frontend.context import AppContext
from services.frontend.engine.client import failure
from services.frontend.engine.streams import RawLogprobs, RequestStream, ResponseStream
from services.frontend.errors import APIError, invalid
from services.frontend.http.disconnect import until_left
from services.frontend.openai.parameters.sampling import checked_ids, too_long
from services.frontend.openai.prompts.encoder import least_tokens, separate_prompts
from services.frontend.openai.schemas.requests import EmbeddingRequest, ScheduledRequest, TextsRequest, VectorsRequest
from services.frontend.openai.schemas.responses import EmbeddingEntry, EmbeddingUsage
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
    params: PoolingParams
    """For a model with a pooler of its own."""

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
        params = PoolingParams(body.use_activation, body.dimensions or 0)
        return cls(dimensions, body.encoding_format == "base64", normalises, params)

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


async def read_prompt(
    context: AppContext, given: Given, body: VectorsRequest, add_special_tokens: bool = True
) -> PooledPrompt:
    """Encode and truncate a text as the served model reads it. Return at least one token. Raises: APIError"""
    most, side = body.truncate_prompt_tokens, body.truncation_side
    state, model = context.engine.state, context.model
    context_length, generates = state.max_model_len, state.pooling is None
    longest = context_length - generates  # a token follows the prompt
    if most == 0:
        raise invalid("truncate_prompt_tokens leaves nothing of the input", "truncate_prompt_tokens")
    if most is not None and not 0 < most < longest:
        most = longest
    second = None
    if isinstance(given, list):
        ids = given
    else:
        first, other = given if isinstance(given, tuple) else (given, None)
        least = least_tokens(first + (other or ""), model.tokenizer) - (other is not None)
        if most is None and least > longest:
            raise too_long(least, context_length, "input", True, generates)
        # transformers cuts a text before it adds special tokens, and vLLM afterwards at a side that is given
        cut = most if not generates and side is None else None
        encode = context.answering.prompts.encode_texts
        ids, second = await encode(first, other, add_special_tokens, cut)
    checked_ids(ids, state.vocab_size, "input")
    if most is not None and len(ids) > most:
        keeps_end = side != "right" if generates else side == "left"
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
    return [await read_prompt(context, given, body, special) for given in inputs]


class EmbeddingStream(RequestStream):
    __slots__ = ("values",)

    def __init__(self, response: ResponseStream) -> None:
        super().__init__(response)
        self.values: bytes | None = None
        """float32[hidden size]"""

    def add_logprobs(self, logprobs: RawLogprobs) -> None:
        """Ignored, as none are requested."""

    def add_embedding(self, values: bytes) -> None:
        self.values = values

    def feed(self, tokens: list[int], end: Finish | None, now: float) -> bytes:
        if end is not None:
            if (error := failure(end)) is not None:
                raise error
            self.has_ended = True
        return b""


async def _vector(
    context: AppContext, prompt: PooledPrompt, shared: GenerateRequest, started: float
) -> NDArray[np.float32]:
    """Return the vector, or vectors, of one prompt. `started`: see `EndedChoice.submitted`. Raises: APIError"""
    stream = EmbeddingStream(ResponseStream(context.engine.flush_queue, shared.request_id))
    ids, second = prompt
    if shared.pooling_params is not None and second is not None:
        shared = replace(shared, pooling_params=replace(shared.pooling_params, second_text=second))
    context.engine.submit(stream, ids, _ONE_TOKEN, shared)
    try:
        await stream.response.last()
    finally:
        context.engine.abort([stream])
    if stream.values is None or not isinstance(stream.end, Finish):
        raise APIError(500, "the engine returned no embedding")
    ended = EndedChoice(started, None, time.monotonic(), "stop", end=stream.end, prompt_tokens=len(ids))
    context.metrics.on_answer(ended)
    return np.frombuffer(stream.values, np.float32)


async def pooled(
    http: HTTPRequest,
    context: AppContext,
    body: ScheduledRequest,
    prompts: list[PooledPrompt],
    encode: Encode,
    params: PoolingParams,
) -> tuple[list[bytes], int]:
    """Return the encoded vector of each prompt, and the number of tokens. At most `MAX_OPEN` are open at once.

    Args:
        params: for a model with a pooler of its own.

    Raises: APIError
    """
    _vector_size(context.engine.state)
    kind = (context.model.pooling, None) if context.engine.state.pooling is None else (Pooling.MODEL, params)
    shared = context.answering.shared(http, body, pooling=kind[0], pooling_params=kind[1])
    http.state.summary.prompt_tokens = count = sum(len(prompt.token_ids) for prompt in prompts)
    entries, waiting, started = [b""] * len(prompts), enumerate(prompts), time.monotonic()

    async def work() -> None:
        for index, prompt in waiting:
            entries[index] = encode(index, await _vector(context, prompt, shared, started))

    async def run() -> None:
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in prompts[:MAX_OPEN]:
                    workers.create_task(work())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    await until_left(http, run())
    return entries, count


async def embed(
    http: HTTPRequest, context: AppContext, body: TextsRequest, prefix: str, encode: Encode, params: PoolingParams
) -> Response:
    """Return the answer with the encoded vector of each input. `prefix`: of its id. Raises: APIError"""
    entries, count = await pooled(http, context, body, await inputs_of(body, context), encode, params)
    head, data = context.answering.head(body, prefix), [*map(msgspec.Raw, entries)]
    answer = {"object": "list", **head, "data": data, "usage": embedding_usage(count)}
    return Response(msgspec.json.encode(answer), media_type="application/json")


def embedding_usage(num_tokens: int) -> EmbeddingUsage:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
