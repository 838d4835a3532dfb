"""/tokenize and /detokenize: vLLM's bodies and answers. They need no engine."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from services.frontend.openai.prompts.encoder import Prompts, checked_ids, spoken
from services.frontend.openai.schemas.requests import MAX_PROMPT_IDS, ChatRequest, Text, TokenId
from services.frontend.text.tokenizer import Tokenizer


class TokenizeCompletionRequest(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    model: str | None = Field(None, max_length=512)
    prompt: Text
    add_special_tokens: bool | None = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(ChatRequest):
    """A conversation as /v1/chat/completions takes it. `add_special_tokens`: what the tokenizer puts around a prompt
    besides, which a chat template has mostly written itself."""

    return_token_strs: bool | None = False


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    model: str | None = Field(None, max_length=512)
    tokens: Annotated[list[TokenId], Field(max_length=MAX_PROMPT_IDS, fail_fast=True)]


async def tokenize(
    body: TokenizeCompletionRequest | TokenizeChatRequest,
    prompts: Prompts,
    tokenizer: Tokenizer,
    max_model_len: int,
) -> dict[str, Any]:
    """`max_model_len` 0: not known yet. Raises: APIError"""
    if isinstance(body, TokenizeChatRequest):
        spoken(body)
        ids = await prompts.encode(await prompts.rendered(body), bool(body.add_special_tokens))
    else:
        ids = await prompts.encode(body.prompt, body.add_special_tokens is not False)
    names = [tokenizer.name(token) for token in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": max_model_len or None, "tokens": ids, "token_strs": names}


async def detokenize(body: DetokenizeRequest, prompts: Prompts, vocab_size: int) -> dict[str, Any]:
    """Special tokens are shown. `vocab_size` 0: not known yet. Raises: APIError"""
    if vocab_size:
        checked_ids(body.tokens, vocab_size, "tokens")
    return {"prompt": await prompts.decode(body.tokens, show_special=True)}
