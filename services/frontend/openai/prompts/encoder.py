"""Prompts to token ids, on worker threads: the tokenizer releases the GIL, so the event loop continues."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request as HTTPRequest

from protocol.codec import unpack
from protocol.media import MediaModel
from protocol.requests import EngineState
from protocol.sampling import BadWords
from services.frontend.errors import invalid
from services.frontend.http.disconnect import until_left
from services.frontend.media import MediaProcessing
from services.frontend.model import ServedModel
from services.frontend.openai.parameters.sampling import COMPLETION_MAX_TOKENS, bad_words, checked_ids, too_long
from services.frontend.openai.prompts.conversation import conversation, media_files, num_chars
from services.frontend.openai.prompts.prompt import Prompt
from services.frontend.openai.schemas.fields import MAX_ANSWERS
from services.frontend.openai.schemas.requests import BaseGenerationRequest, ChatRequest, CompletionRequest
from services.frontend.templates.jobs import Conversation
from services.frontend.text.tokenizer import CutSide, Tokenizer

T = TypeVar("T")
LARGE = 262_144
"""Characters from which a text is encoded on the thread for large texts, so that small ones do not wait for it."""
MAX_CHARS = 2_097_152
"""Longest text that is encoded. The tokenizer takes up to 180 bytes of memory per character and cannot be stopped."""


class PromptEncoder:
    """Renders, tokenizes and checks the prompts of request bodies."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._small = ThreadPoolExecutor(2, "tokenizer")
        self._large = ThreadPoolExecutor(1, "tokenizer-large")
        self._media = MediaProcessing(model.directory, model.media_domains, model.max_media_bytes)

    def close(self) -> None:
        """End the process that reads files."""
        self._media.close()

    async def for_completion(self, body: CompletionRequest, state: EngineState) -> list[Prompt]:
        """Raises: APIError"""
        given_prompts = separate_prompts(body.prompt)
        if not given_prompts or not all(given_prompts):
            raise invalid("the prompt is empty", "prompt")
        if (answers := len(given_prompts) * (body.n or 1)) > MAX_ANSWERS:
            raise invalid(f"the prompts have {answers} answers in all; at most {MAX_ANSWERS} are possible", "n")
        keep = self.kept(body, state.max_model_len)
        prompts = []
        for given in given_prompts:
            if isinstance(given, str):
                ids = await self._encode(given, body, state, "prompt")
            else:
                ids = checked_ids(given if keep is None else given[-keep:], state.vocab_size, "prompt")
            prompts.append(Prompt(ids))
            if body.echo:
                whole = isinstance(given, str) and (keep is None or len(ids) < keep)
                await self._set_echo(prompts[-1], str(given) if whole else None, body)
        return prompts

    async def for_chat(self, http: HTTPRequest, body: ChatRequest, state: EngineState) -> Prompt:
        """Render the conversation with the model's template and encode it. Its images and sounds are not read on if
        the client leaves. Raises: APIError"""
        text = await self.rendered(body, state.media)
        return await self._with_files(http, body, state.media, await self._encode(text, body, state, "messages"))

    async def _with_files(
        self, http: HTTPRequest, body: ChatRequest, media: MediaModel | None, ids: list[int]
    ) -> Prompt:
        """Raises: APIError"""
        if media is None or not (files := media_files(body)):
            return Prompt(ids)
        found = await until_left(http, self._media.process(media, ids, files))
        return Prompt(unpack(found.token_ids).tolist(), media=found.media)

    async def rendered(self, body: ChatRequest, media: MediaModel | None) -> str:
        """`media`: None: images and sounds are refused. Raises: APIError"""
        if files := media_files(body):
            if media is None:
                raise invalid(
                    "images and sounds are not served here: this model, backend or route has text only", "messages"
                )
            if body.truncate_prompt_tokens is not None or body.prompt_logprobs is not None:
                raise invalid(
                    "truncate_prompt_tokens and prompt_logprobs are not served with images or sounds", "messages"
                )
            if body.continue_final_message or body.echo:
                raise invalid("continue_final_message and echo are not served with images or sounds", "messages")
            self._media.check(files)
        return await self.run(num_chars(body), lambda: self._model.template.render(conversation(body)))

    async def encode_chat(
        self, http: HTTPRequest, body: ChatRequest, media: MediaModel | None, keep: int | None = None
    ) -> list[int]:
        """Return the tokens of a conversation, of any length. `media`: see `rendered`. `keep`: see `encode`.

        Raises: APIError
        """
        answer_role(body)  # refuses contradictory fields
        ids = await self.encode(await self.rendered(body, media), bool(body.add_special_tokens), keep)
        return (await self._with_files(http, body, media, ids)).token_ids

    async def rendered_pair(self, query: str, document: str, variables: Mapping[str, Any]) -> str:
        """Render two texts with the template for pairs. Raises: APIError"""
        roles = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        given = Conversation(roles, add_generation_prompt=False, variables=variables)
        return await self.run(len(query) + len(document), lambda: self._model.template.render(given))

    async def bad_words(self, words: list[str]) -> BadWords:
        """Raises: APIError"""
        if not words:
            return ()
        encode = partial(self._model.tokenizer.encode, add_special_tokens=False)
        return await self.run(sum(map(len, words)), lambda: bad_words(words, encode))

    async def encode(self, text: str, add_special_tokens: bool, keep: int | None = None) -> list[int]:
        """`keep`: number of tokens to keep, the last ones; None: all. Raises: APIError, if the text is too long"""
        if keep is not None:
            return (await self.encode_texts(text, None, add_special_tokens, keep, "left"))[0]
        return await self._run_encoder(len(text), lambda: self._model.tokenizer.encode(text, add_special_tokens))

    async def encode_texts(
        self, first: str, second: str | None, add_special_tokens: bool, most: int | None, cut: CutSide = "right"
    ) -> tuple[list[int], int | None]:
        """See `Tokenizer.encode_texts`. Raises: APIError, if a text is too long"""
        encode = self._model.tokenizer.encode_texts
        size = len(first) + len(second or "")
        return await self._run_encoder(size, lambda: encode(first, second, add_special_tokens, most, cut))

    async def _run_encoder(self, size: int, work: Callable[[], T]) -> T:
        """`size`: characters. Raises: APIError, if they are too many"""
        if size > MAX_CHARS:
            raise invalid(f"a text has {size} characters, but at most {MAX_CHARS} are tokenized")
        return await self.run(size, work)

    async def decode(self, ids: list[int], show_special: bool) -> str:
        return await self.run(len(ids), lambda: self._model.tokenizer.decode(ids, show_special))

    async def _encode(self, text: str, body: BaseGenerationRequest, state: EngineState, param: str) -> list[int]:
        """Encode a text of `body`. Raises: APIError, also if it is too long"""
        least = least_tokens(text, self._model.tokenizer)
        if least >= state.max_model_len and body.truncate_prompt_tokens is None:
            raise too_long(least, state.max_model_len, param, at_least=True)
        is_chat = isinstance(body, ChatRequest)  # a chat template writes the special tokens itself
        special = not is_chat if body.add_special_tokens is None else body.add_special_tokens
        ids = await self.encode(text, special, self.kept(body, state.max_model_len))
        return checked_ids(ids, state.vocab_size, param)

    @staticmethod
    def kept(body: BaseGenerationRequest, max_model_len: int) -> int | None:
        """Return the number of tokens to keep of a prompt; None: all. Raises: APIError"""
        keep = body.truncate_prompt_tokens
        if keep is not None and (keep == 0 or keep > max_model_len):
            raise invalid(
                f"truncate_prompt_tokens {keep} is not between 1 and the {max_model_len} tokens of the context, "
                "or -1 for what the context holds",
                "truncate_prompt_tokens",
            )
        return max(max_model_len - _output_room(body), 1) if keep == -1 else keep

    async def _set_echo(self, prompt: Prompt, given: str | None, body: CompletionRequest) -> None:
        """Set the text of the prompt, and the offsets of its tokens if log-probabilities are shown. `given`: the text
        of which it has all tokens; None: there is none."""
        ids, show_special = prompt.token_ids, not body.skip_special_tokens
        prompt.text = await self.decode(ids, show_special) if given is None else given
        if body.logprobs is None:
            return

        def offsets() -> list[int]:
            text, found, at = self._model.tokenizer.detokenizer([], show_special), [], 0
            for token in ids:
                found.append(at)
                at += len(text.push(token))
            return found

        if given is not None:
            bare = await self.encode(given, add_special_tokens=False)
            prompt.num_hidden = _num_before(bare, ids)
        found = await self.run(len(ids) * 100, offsets)
        prompt.offsets = [max(at - found[prompt.num_hidden], 0) for at in found]

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Do the work on a text of this many characters on the thread for its size."""
        pool = self._large if size >= LARGE else self._small
        return await asyncio.get_running_loop().run_in_executor(pool, work)


def _num_before(text: list[int], ids: list[int]) -> int:
    """Return the number of tokens before the text's in `ids`; 0 if it is not there."""
    extra = len(ids) - len(text)
    return next((n for n in range(extra + 1) if text and ids[n : n + len(text)] == text), 0)


def least_tokens(text: str, tokenizer: Tokenizer) -> int:
    """Return a lower bound of the tokens in `text`, without the work of encoding it; 0 if none is known."""
    return len(text) // tokenizer.max_token_chars if tokenizer.max_token_chars else 0


def answer_role(body: ChatRequest) -> tuple[str, str]:
    """Return the role of the answer's message, and the beginning of it that the conversation has, if `echo` is set.

    Raises: APIError
    """
    last = body.messages[-1]
    if body.continue_final_message and body.add_generation_prompt is not False:
        raise invalid(
            "continue_final_message continues a message, add_generation_prompt begins one; set the latter to false",
            "continue_final_message",
        )
    role = "assistant" if body.add_generation_prompt is not False else last.role
    return role, last.plain()["content"] if body.echo and last.role == role else ""


def _output_room(body: BaseGenerationRequest) -> int:
    """Return the number of tokens that a truncated prompt leaves for the answer."""
    given = body.max_tokens
    if isinstance(body, ChatRequest):
        given = body.max_completion_tokens if body.max_completion_tokens is not None else given
        return 1 if given is None else given
    return COMPLETION_MAX_TOKENS if given is None else max(given, 1)


def separate_prompts(given: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """Return the prompts of a body's field that holds one or several."""
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    return [ids] if ids else [item for item in given if not isinstance(item, int)]
