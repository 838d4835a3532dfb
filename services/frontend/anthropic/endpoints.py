"""/v1/messages and /v1/messages/count_tokens: Anthropic's dialect of a chat."""

import uuid

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from services.frontend.anthropic import schemas
from services.frontend.anthropic.answers import MessageEvents
from services.frontend.anthropic.conversation import chat_request
from services.frontend.context import Context, recorded
from services.frontend.errors import ANTHROPIC_PREFIX, AnthropicErrorResponse
from services.frontend.openai.answering import AnswerRequest
from services.frontend.openai.answers.chat_output import AnswerParser, ChatOutput
from services.frontend.openapi import WITH_BODY, errors, read_by_handler

router = APIRouter(prefix=ANTHROPIC_PREFIX, responses=errors(*WITH_BODY, body=AnthropicErrorResponse))


@router.post(
    "/count_tokens",
    summary="Counts the tokens of a conversation",
    openapi_extra=read_by_handler(schemas.CountTokensRequest),
)
async def count_tokens(http: HTTPRequest, context: Context) -> schemas.CountTokensResponse:
    given = await context.bodies.parse(http, schemas.CountTokensRequest)
    context.model.adapter(given.model)
    return {"input_tokens": await context.answering.count_tokens(http, chat_request(given))}


@router.post(
    "",
    summary="Continues a conversation, in Anthropic's dialect",
    response_model=schemas.MessageResponse,
    openapi_extra=read_by_handler(schemas.MessagesRequest, event=schemas.MessageEvent, error=AnthropicErrorResponse),
)
@recorded
async def messages(http: HTTPRequest, context: Context) -> Response:
    given = await context.bodies.parse(http, schemas.MessagesRequest)
    answering, model, state = context.answering, context.model, context.engine.state
    answering.check(given.model)
    body = chat_request(given)
    output = ChatOutput.from_body(body, model.formats)
    prompt = await answering.prompts.for_chat(http, body, state)
    output = output.after(prompt.token_ids, model.tokenizer)
    shared = answering.shared(http, body, structured=output.grammar(), media=prompt.media)
    request = AnswerRequest(http, body, shared, await answering.submissions(body, [prompt]))
    head: schemas.MessageHead = {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": given.model or model.names[0],
    }
    parser = AnswerParser(output, eager=bool(given.stream))
    message = MessageEvents(head, parser, request.usage, http.state.request_id)
    if given.stream:
        return await answering.streamed(request, message)
    (whole,), _ = await answering.whole(request)
    content = await answering.built([whole], lambda: msgspec.json.encode(message.whole(whole)))
    return Response(content, media_type="application/json")
