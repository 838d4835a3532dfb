"""/tokenize and /detokenize: vLLM's routes. They work without the engine, except truncation and files."""

from typing import Annotated

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from typing_extensions import TypedDict

from services.frontend.context import Context
from services.frontend.openai.parameters.sampling import checked_ids
from services.frontend.openai.prompts.conversation import media_files
from services.frontend.openai.schemas.fields import Text, TokenId
from services.frontend.openai.schemas.requests import BaseRequest, ChatRequest, CompletionRequest
from services.frontend.openai.schemas.responses import Natural
from services.frontend.openapi import WITH_BODY, errors, read_by_handler

MAX_IDS = 262_144
"""Token ids of one /detokenize. The event loop checks them, which takes milliseconds."""


class TokenizeCompletionRequest(CompletionRequest):
    """A text as for /v1/completions."""

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


router = APIRouter(responses=errors(*WITH_BODY))


@router.post(
    "/tokenize",
    summary="Text or a conversation to token ids",
    response_model=TokenizeResponse,
    openapi_extra=read_by_handler(TokenizeCompletionRequest, TokenizeChatRequest),
)
async def tokenize(http: HTTPRequest, context: Context) -> Response:
    body = await context.bodies.parse_prompt(http, TokenizeChatRequest, TokenizeCompletionRequest)
    context.model.adapter(body.model)
    encoder, state = context.answering.prompts, context.engine.state
    has_files = isinstance(body, TokenizeChatRequest) and media_files(body)
    if has_files or body.truncate_prompt_tokens is not None:
        context.engine.check_ready()  # it is known whether the model has images, and how long its context is
    keep = encoder.kept(body, state.max_model_len)
    if isinstance(body, TokenizeChatRequest):
        ids = await encoder.encode_chat(http, body, state.media, keep)
    else:
        ids = await encoder.encode(body.prompt, body.add_special_tokens is not False, keep)

    def content() -> bytes:
        names = [context.model.tokenizer.name(token) for token in ids] if body.return_token_strs else None
        answer: TokenizeResponse = {
            "count": len(ids),
            "max_model_len": state.max_model_len or None,  # 0: the engine has not reported it
            "tokens": ids,
            "token_strs": names,
        }
        return msgspec.json.encode(answer)

    return Response(await encoder.run(len(ids), content), media_type="application/json")


@router.post(
    "/detokenize",
    summary="Token ids to text",
    response_model=DetokenizeResponse,
    openapi_extra=read_by_handler(DetokenizeRequest),
)
async def detokenize(http: HTTPRequest, context: Context) -> Response:
    """Special tokens are shown."""
    body = await context.bodies.parse(http, DetokenizeRequest)
    context.model.adapter(body.model)
    if size := context.engine.state.vocab_size:  # 0: the engine has not reported it
        checked_ids(body.tokens, size, "tokens")
    answer: DetokenizeResponse = {"prompt": await context.answering.prompts.decode(body.tokens, show_special=True)}
    return Response(msgspec.json.encode(answer), media_type="application/json")
