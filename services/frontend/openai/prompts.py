"""Prompts as token ids, made on threads of their own: the tokenizer holds no lock, and no event loop waits for it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.frontend.errors import invalid
from services.frontend.model import ServedModel
from services.frontend.openai.parameters import too_long
from services.frontend.openai.schemas import ChatRequest, CompletionRequest
from services.frontend.tokenizer import Tokenizer

T = TypeVar("T")

LARGE = 262_144
"""Characters from which on a text has to wait for others of its size, not in the way of small ones."""


class Prompts:
    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._small = ThreadPoolExecutor(2, "tokenizer")
        self._large = ThreadPoolExecutor(1, "tokenizer-large")

    def close(self) -> None:
        for pool in (self._small, self._large):
            pool.shutdown(wait=False, cancel_futures=True)

    async def of_completion(
        self, body: CompletionRequest, vocab_size: int, max_model_len: int
    ) -> list[list[int]]:
        """Token ids of each prompt. Raises: APIError"""
        several = _several(body.prompt)
        if not several or not all(several):
            raise invalid("the prompt is empty", "prompt")
        tokenizer = self._model.tokenizer
        prompts = []
        for prompt in several:
            if not isinstance(prompt, str):
                prompts.append(_checked(prompt, vocab_size))
                continue
            ids = await self._encode(prompt, tokenizer.encode, max_model_len, "prompt")
            prompts.append(_checked(ids, vocab_size))
        return prompts

    async def of_chat(self, body: ChatRequest, vocab_size: int, max_model_len: int) -> list[int]:
        """Token ids of the conversation in the model's template. Raises: APIError"""
        messages = [message.plain() for message in body.messages]
        size = sum(len(message["content"]) for message in messages)
        text = await self._run(size, lambda: self._model.template.render(messages))
        encode = self._model.tokenizer.encode_rendered
        return _checked(await self._encode(text, encode, max_model_len, "messages"), vocab_size)

    async def _encode(
        self, text: str, encode: Callable[[str], list[int]], max_model_len: int, param: str
    ) -> list[int]:
        least = _least_tokens(text, self._model.tokenizer)
        if least >= max_model_len:
            raise too_long(least, max_model_len, param, at_least=True)
        return await self._run(len(text), lambda: encode(text))

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        pool = self._large if size >= LARGE else self._small
        return await asyncio.get_running_loop().run_in_executor(pool, work)


def _least_tokens(text: str, tokenizer: Tokenizer) -> int:
    """Refuses without minutes of work what can never fit."""
    return len(text) // tokenizer.max_token_chars if tokenizer.max_token_chars else 0


def _checked(ids: list[int], vocab_size: int) -> list[int]:
    """Raises: APIError, for ids beyond the model's logits."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        outside = next(token for token in ids if not 0 <= token < vocab_size)
        raise invalid(f"prompt: token {outside} is not between 0 and {vocab_size - 1}", "prompt")
    return ids


def _several(given: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    return [ids] if ids else [item for item in given if not isinstance(item, int)]
