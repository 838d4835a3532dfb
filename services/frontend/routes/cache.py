"""`POST /v1/cache` of `--enable-admin-routes`: pins, lists and drops prefixes in the engines' caches."""

import uuid
from typing import Literal

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from typing_extensions import TypedDict

from protocol.block_names import names_of
from protocol.codec import pack
from protocol.requests import CacheAction, ControlCache, EngineState
from services.frontend.context import AppContext, Context
from services.frontend.errors import APIError, invalid
from services.frontend.openai.parameters.sampling import checked_ids
from services.frontend.openai.schemas.fields import Text, TokenIds
from services.frontend.openai.schemas.requests import ChatRequest, ScheduledRequest
from services.frontend.openapi import WITH_BODY, errors, read_by_handler

router = APIRouter(responses=errors(*WITH_BODY))

Action = Literal["list", "pin", "unpin", "drop"]
_ACTIONS = {action.name.lower(): action for action in CacheAction}
_ID = Field(None, pattern=r"^[A-Za-z0-9_.:-]{1,64}$")


class CachePromptRequest(ScheduledRequest):
    action: Action
    pin: str | None = _ID
    """Id of a pin. For a new one it may be left out."""
    prompt: Text | TokenIds | None = None
    add_special_tokens: bool | None = True


class CacheChatRequest(ChatRequest):
    """A prefix as the messages of a conversation."""

    action: Action
    pin: str | None = _ID


class PinEntry(TypedDict):
    pin: str
    owner: str
    """Digest of the API key whose requests find the prefix; "": there are no keys."""
    tokens: int
    cached_tokens: int
    """Tokens whose blocks are in the cache. The others are pinned when a request has computed them."""
    bytes: int
    """Size of these blocks on all ranks."""


class EngineCacheEntry(TypedDict):
    engine: str
    pins: list[PinEntry]
    dropped_tokens: int
    """Tokens of the blocks that have left the cache. Those of tiers are not counted."""


class CacheAnswer(TypedDict):
    engines: list[EngineCacheEntry]


@router.post(
    "/v1/cache",
    summary="Pins, lists and drops prefixes in the caches of all engines",
    response_model=CacheAnswer,
    openapi_extra=read_by_handler(CachePromptRequest, CacheChatRequest),
)
async def control_cache(http: HTTPRequest, context: Context) -> Response:
    body = await context.bodies.parse_prompt(http, CacheChatRequest, CachePromptRequest)
    context.answering.check(body.model)
    tokens = await _tokens(http, body, context)
    action, pin = _ACTIONS[body.action], body.pin or ""
    if action is CacheAction.PIN:
        if tokens is None:
            raise invalid("a pin needs a prompt or messages", "prompt")
        pin = pin or uuid.uuid4().hex[:12]
    elif action is not CacheAction.LIST and bool(pin) == (tokens is not None and action is CacheAction.DROP):
        what = "the id of a pin" + (", or a prompt or messages" if action is CacheAction.DROP else "")
        raise invalid(f"{body.action} needs {what}", "pin")
    salt = context.answering.shared(http, body).salt

    def make(state: EngineState, number: int) -> ControlCache:
        names = [] if tokens is None else names_of(salt, pack(tokens), state.block_size)
        return ControlCache(number, action, pin, http.state.tenant, b"".join(names))

    answers = await context.engine.control_cache(make, is_drop=action is CacheAction.DROP)
    if refused := [(name, answer.error) for name, answer in answers.items() if answer.error]:
        raise APIError(409, "; ".join(f"engine {name}: {error}" for name, error in refused))
    answer: CacheAnswer = {
        "engines": [
            {
                "engine": name,
                "pins": [
                    {
                        "pin": pinned.pin,
                        "owner": pinned.owner,
                        "tokens": pinned.num_tokens,
                        "cached_tokens": pinned.num_held,
                        "bytes": pinned.num_bytes,
                    }
                    for pinned in done.pins
                ],
                "dropped_tokens": done.num_dropped,
            }
            for name, done in answers.items()
        ]
    }
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _tokens(
    http: HTTPRequest, body: CachePromptRequest | CacheChatRequest, context: AppContext
) -> list[int] | None:
    """Return the tokens of the prefix; None: none is given. Raises: APIError, also if it has no full block"""
    state, encoder = context.engine.state, context.answering.prompts
    if isinstance(body, CacheChatRequest):
        field, ids = "messages", await encoder.encode_chat(http, body, None)
    elif body.prompt is None:
        return None
    elif isinstance(body.prompt, str):
        field, ids = "prompt", await encoder.encode(body.prompt, body.add_special_tokens is not False)
    else:
        field, ids = "prompt", body.prompt
    if not state.block_size <= len(ids) <= state.max_model_len:
        raise invalid(
            f"the prefix has {len(ids)} tokens, but a block has {state.block_size} and the context "
            f"{state.max_model_len}; only full blocks are kept",
            field,
        )
    return checked_ids(ids, state.vocab_size, field)
