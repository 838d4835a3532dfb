"""/tokenize and /detokenize: vLLM's request and response bodies. They work without the engine."""

from typing import Annotated

import msgspec
from pydantic import Field
from typing_extensions import TypedDict

from services.frontend.openai.prompts.encoder import PromptEncoder, answer_role, checked_ids
from services.frontend.openai.schemas.fields import Text, TokenId
from services.frontend.openai.schemas.requests import BaseRequest, ChatRequest
from services.frontend.openai.schemas.responses import Natural
from services.frontend.text.tokenizer import Tokenizer

MAX_IDS = 262_144
"""Token ids of one /detokenize. The event loop checks them, which takes milliseconds."""


class TokenizeCompletionRequest(BaseRequest):
    prompt: Text
    add_special_tokens: bool | None = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(ChatRequest):
    """A conversation as for /v1/chat/completions.

    `add_special_tokens` adds the tokenizer's own special tokens, which most chat templates have written already.
    """

    return_token_strs: bool | None = False


class DetokenizeRequest(BaseRequest):
    tokens: Annotated[list[TokenId], Field(max_length=MAX_IDS, fail_fast=True)]


class TokenizeResponse(TypedDict):
    count: Natural
    max_model_len: Natural | None
    tokens: list[Natural]
    token_strs: list[str] | None


class DetokenizeResponse(TypedDict):
    prompt: str


async def tokenize(
    body: TokenizeCompletionRequest | TokenizeChatRequest,
    encoder: PromptEncoder,
    tokenizer: Tokenizer,
    max_model_len: int,
) -> bytes:
    """Return the JSON of the answer.

    Args:
        max_model_len: 0 if the engine has not reported it.

    Raises: APIError
    """
    if isinstance(body, TokenizeChatRequest):
        answer_role(body)  # refuses contradictory fields
        ids = await encoder.encode(await encoder.rendered(body), bool(body.add_special_tokens))
    else:
        ids = await encoder.encode(body.prompt, body.add_special_tokens is not False)

    def content() -> bytes:
        names = [tokenizer.name(token) for token in ids] if body.return_token_strs else None
        answer: TokenizeResponse = {
            "count": len(ids),
            "max_model_len": max_model_len or None,
            "tokens": ids,
            "token_strs": names,
        }
        return msgspec.json.encode(answer)

    return await encoder.run(len(ids), content)


async def detokenize(body: DetokenizeRequest, encoder: PromptEncoder, vocab_size: int) -> bytes:
    """Return the JSON of the answer. Special tokens are shown.

    Args:
        vocab_size: 0 if the engine has not reported it.

    Raises: APIError
    """
    if vocab_size:
        checked_ids(body.tokens, vocab_size, "tokens")
    answer: DetokenizeResponse = {"prompt": await encoder.decode(body.tokens, show_special=True)}
    return msgspec.json.encode(answer)
