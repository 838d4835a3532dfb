"""/v1/embeddings: each input is a prompt that nothing is generated for."""

import asyncio
import base64
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.types import Receive

from protocol.requests import Embedding, Finish
from protocol.sampling import Pooling, SamplingParams
from services.frontend.engine.client import EngineClient, RequestStream, failure
from services.frontend.engine.inbox import Event, Inbox
from services.frontend.errors import APIError, invalid
from services.frontend.metrics import Metrics
from services.frontend.openai.parameters.sampling import too_long
from services.frontend.openai.prompts.encoder import Prompts, checked_ids, least_tokens, several_of
from services.frontend.openai.schemas.requests import EmbeddingRequest
from services.frontend.text.tokenizer import Tokenizer

MAX_OPEN = 64
"""Inputs of one body that are in the engine at once: a long list is not in everybody's way."""
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True)
class Form:
    """How the client wants its embeddings."""

    dimensions: int
    as_base64: bool

    @classmethod
    def of(cls, body: EmbeddingRequest, hidden_size: int) -> "Form":
        """Raises: APIError"""
        if not hidden_size:
            raise invalid("this server gives no embeddings; its backend computes none", "model")
        wanted = body.dimensions or hidden_size
        if wanted > hidden_size:
            raise invalid(
                f"dimensions is {wanted}, but this model's embeddings have {hidden_size}", "dimensions"
            )
        return cls(wanted, body.encoding_format == "base64")

    def encoded(self, index: int, values: NDArray[np.float32]) -> bytes:
        """JSON of one entry of `data`; `values` float32[hidden size] as the model has them. Raises: APIError"""
        unit = normalised(values[: self.dimensions])
        # little-endian, as the official client reads it
        shown = base64.b64encode(unit.astype("<f4").tobytes()).decode() if self.as_base64 else unit.tolist()
        return msgspec.json.encode({"object": "embedding", "index": index, "embedding": shown})


def normalised(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 of length 1 in the sense of L2; zeros stay zeros. Raises: APIError, where a number is not finite"""
    exact = values.astype(np.float64)  # its square cannot overflow
    if not np.isfinite(exact).all():
        raise APIError(500, "the model gave an embedding that is no finite number")
    length = float(np.sqrt(exact @ exact))
    return (exact / (length or 1.0)).astype(np.float32)


async def token_ids(
    body: EmbeddingRequest, prompts: Prompts, tokenizer: Tokenizer, vocab_size: int, max_model_len: int
) -> list[list[int]]:
    """Of each input, at least one. Raises: APIError"""
    several = several_of(body.input)
    if not several or not all(several):
        raise invalid("an input is empty", "input")
    longest = max_model_len - 1  # the engine counts a token more, as if one were to follow
    keep = longest if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    if keep == 0:
        raise invalid("truncate_prompt_tokens leaves nothing of the input", "truncate_prompt_tokens")
    found = []
    for given in several:
        if isinstance(given, str):
            if keep is None and (least := least_tokens(given, tokenizer)) > longest:
                raise too_long(least, max_model_len, "input", at_least=True)
            ids = await prompts.encode(given, body.add_special_tokens is not False)
        else:
            ids = given
        checked_ids(ids, vocab_size, "input")
        found.append(ids if keep is None else ids[-keep:])
        if len(found[-1]) > longest:
            raise too_long(len(found[-1]), max_model_len, "input")
    return found


class Embedder:
    """The inputs of one HTTP request, until each has its embedding. Whoever makes one closes it."""

    def __init__(self, engine: EngineClient, metrics: Metrics, pooling: Pooling, form: Form) -> None:
        self._engine, self._metrics, self._pooling, self._form = engine, metrics, pooling, form
        self._inbox = Inbox(engine.turn)
        self._open: dict[int, RequestStream] = {}
        self._watcher: asyncio.Task[None] | None = None

    def close(self) -> None:
        """However it went, nothing of it stays open in the engine."""
        self._engine.abort(list(self._open.values()))
        if self._watcher is not None:
            self._watcher.cancel()

    def watch(self, receive: Receive) -> None:
        """From here on `run` raises when the client leaves."""
        self._watcher = self._inbox.watch(receive)

    async def run(self, prompts: list[list[int]], priority: int, salt: str, name: str) -> list[bytes]:
        """The JSON of each prompt's entry, in order. Raises: APIError"""
        done: list[bytes] = [b""] * len(prompts)
        started, following = time.monotonic(), 0
        while following < len(prompts) or self._open:
            while following < len(prompts) and len(self._open) < MAX_OPEN:
                self._open[following] = self._engine.submit(
                    self._inbox, following, prompts[following], _ONE_TOKEN, priority, salt, name,
                    pooling=self._pooling,
                )  # fmt: skip
                following += 1
            for index, event in await self._inbox.take():
                entry = self._entry(index, event)
                if entry is not None:
                    done[index] = entry
                elif isinstance(event, Finish):
                    del self._open[index]
                    if not done[index]:
                        raise APIError(500, "the engine returned no embedding")
                    self._metrics.on_answer("stop", time.monotonic() - started, 0)
        return done

    def _entry(self, index: int, event: Event) -> bytes | None:
        """What an event says of the embedding; None at its end. Raises: APIError"""
        match event:
            case Embedding():
                return self._form.encoded(index, np.frombuffer(event.values, np.float32))
            case Finish() if (error := failure(event)) is not None:
                raise error
            case APIError():
                raise event
            case _:
                return None


def answer(head: dict[str, Any], entries: list[bytes], prompt_tokens: int) -> bytes:
    """JSON of the whole answer."""
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return msgspec.json.encode({**head, "data": [*map(msgspec.Raw, entries)], "usage": usage})
