"""Prompts as token ids, made on threads of their own: the tokenizer holds no lock, and no event loop waits for it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from protocol.sampling import BadWords
from services.frontend.errors import invalid
from services.frontend.model import ServedModel
from services.frontend.openai.parameters.sampling import COMPLETION_MAX_TOKENS, bad_words, too_long
from services.frontend.openai.prompts.conversation import conversation, num_chars
from services.frontend.openai.prompts.prompt import Prompt
from services.frontend.openai.schemas.requests import ChatRequest, CompletionRequest, Request
from services.frontend.text.tokenizer import Tokenizer

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
    ) -> list[Prompt]:
        """Raises: APIError"""
        several = several_of(body.prompt)
        if not several or not all(several):
            raise invalid("the prompt is empty", "prompt")
        prompts = []
        for given in several:
            if isinstance(given, str):
                ids = await self._encode(given, body, vocab_size, max_model_len, "prompt")
            else:
                ids = checked_ids(self._truncated(given, body, max_model_len), vocab_size, "prompt")
            prompts.append(Prompt(ids))
            if body.echo:
                await self._echoed(prompts[-1], given, body)
        return prompts

    async def of_chat(self, body: ChatRequest, vocab_size: int, max_model_len: int) -> Prompt:
        """The conversation in the model's template. Raises: APIError"""
        text = await self.rendered(body)
        return Prompt(await self._encode(text, body, vocab_size, max_model_len, "messages"))

    async def rendered(self, body: ChatRequest) -> str:
        """Raises: APIError"""
        return await self._run(num_chars(body), lambda: self._model.template.render(conversation(body)))

    async def bad_words(self, words: list[str]) -> BadWords:
        """Raises: APIError"""
        if not words:
            return ()
        encode = self._model.tokenizer.encode_rendered
        return await self._run(sum(map(len, words)), lambda: bad_words(words, encode))

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Of any length."""
        tokenizer = self._model.tokenizer
        encode = tokenizer.encode if add_special_tokens else tokenizer.encode_rendered
        return await self._run(len(text), lambda: encode(text))

    async def decode(self, ids: list[int], show_special: bool) -> str:
        tokenizer = self._model.tokenizer
        decode = tokenizer.decode_all if show_special else tokenizer.decode
        return await self._run(len(ids), lambda: decode(ids))

    async def _encode(
        self, text: str, body: Request, vocab_size: int, max_model_len: int, param: str
    ) -> list[int]:
        """A text of `body`, no longer than it may be. Raises: APIError"""
        least = least_tokens(text, self._model.tokenizer)
        if least >= max_model_len and body.truncate_prompt_tokens is None:
            raise too_long(least, max_model_len, param, at_least=True)
        is_chat = isinstance(body, ChatRequest)  # whose template has written its special tokens itself
        special = not is_chat if body.add_special_tokens is None else body.add_special_tokens
        ids = await self.encode(text, special)
        return checked_ids(self._truncated(ids, body, max_model_len), vocab_size, param)

    @staticmethod
    def _truncated(ids: list[int], body: Request, max_model_len: int) -> list[int]:
        """Raises: APIError"""
        most = body.truncate_prompt_tokens
        if most is None:
            return ids
        if most == 0 or most > max_model_len:
            raise invalid(
                f"truncate_prompt_tokens {most} is not between 1 and the {max_model_len} tokens of the context, "
                "or -1 for what the context holds",
                "truncate_prompt_tokens",
            )
        return ids[-(most if most > 0 else max(max_model_len - _output_room(body), 1)) :]

    async def _echoed(self, prompt: Prompt, given: str | list[int], body: CompletionRequest) -> None:
        """Fills in what will be shown of the prompt."""
        ids, show_special = prompt.token_ids, not body.skip_special_tokens
        whole = isinstance(given, str) and body.truncate_prompt_tokens is None
        prompt.text = str(given) if whole else await self.decode(ids, show_special)
        if body.logprobs is None:
            return

        def offsets() -> list[int]:
            text, found, at = self._model.tokenizer.stream([], show_special), [], 0
            for token in ids:
                found.append(at)
                at += len(text.push(token))
            return found

        prompt.offsets = await self._run(len(ids) * 100, offsets)

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        pool = self._large if size >= LARGE else self._small
        return await asyncio.get_running_loop().run_in_executor(pool, work)


def least_tokens(text: str, tokenizer: Tokenizer) -> int:
    """Refuses without minutes of work what can never fit."""
    return len(text) // tokenizer.max_token_chars if tokenizer.max_token_chars else 0


def spoken(body: ChatRequest) -> tuple[str, str]:
    """Whose message the answer is, and what of it the conversation has already, where `echo` asks to see that.

    Raises: APIError
    """
    last = body.messages[-1]
    if body.continue_final_message and body.add_generation_prompt is not False:
        raise invalid(
            "continue_final_message goes on with a message, add_generation_prompt begins one; set the latter to "
            "false",
            "continue_final_message",
        )
    role = "assistant" if body.add_generation_prompt is not False else last.role
    return role, last.plain()["content"] if body.echo and last.role == role else ""


def _output_room(body: Request) -> int:
    """Tokens that a truncated prompt leaves for the answer."""
    wanted = body.max_tokens
    if isinstance(body, ChatRequest):
        wanted = body.max_completion_tokens if body.max_completion_tokens is not None else wanted
        return 1 if wanted is None else wanted
    return COMPLETION_MAX_TOKENS if wanted is None else max(wanted, 1)


def checked_ids(ids: list[int], vocab_size: int, param: str) -> list[int]:
    """Raises: APIError, for ids beyond the model's logits."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        outside = next(token for token in ids if not 0 <= token < vocab_size)
        raise invalid(f"{param}: token {outside} is not between 0 and {vocab_size - 1}", param)
    return ids


def several_of(given: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    return [ids] if ids else [item for item in given if not isinstance(item, int)]
