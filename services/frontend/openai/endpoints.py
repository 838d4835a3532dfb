"""Routes that generate or embed, in OpenAI's and vLLM's form."""

import asyncio

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from protocol.sampling import StructuredOutputParams
from services.frontend.context import AppContext, Context, recorded
from services.frontend.openai.answering import AnswerRequest
from services.frontend.openai.answers.chat_output import ChatOutput
from services.frontend.openai.answers.dialects import ChatDialect, CompletionDialect, Dialect
from services.frontend.openai.answers.events import EventEncoder
from services.frontend.openai.answers.usage import ReasoningCounter
from services.frontend.openai.embeddings import EmbeddingFormat, embed
from services.frontend.openai.parameters.structured import structured_params
from services.frontend.openai.prompts.encoder import answer_role
from services.frontend.openai.prompts.prompt import Prompt
from services.frontend.openai.schemas import responses
from services.frontend.openai.schemas.requests import ChatRequest, CompletionRequest, EmbeddingRequest, StreamOptions
from services.frontend.openai.tasks import GENERATE, check_task
from services.frontend.openapi import WITH_BODY, errors, read_by_handler

router = APIRouter(responses=errors(*WITH_BODY))


@router.post(
    "/v1/completions",
    summary="Continues one or several texts",
    response_model=responses.CompletionResponse,
    openapi_extra=read_by_handler(CompletionRequest, event=responses.CompletionChunk),
)
@recorded
async def completions(http: HTTPRequest, context: Context) -> Response:
    body = await context.bodies.parse(http, CompletionRequest)
    answering, state = context.answering, context.engine.state
    answering.check(body.model)
    prompts = await answering.prompts.for_completion(body, state)
    return await _answer(http, context, body, prompts, CompletionDialect(), structured_params(body))


@router.post(
    "/v1/chat/completions",
    summary="Continues a conversation",
    response_model=responses.ChatResponse,
    openapi_extra=read_by_handler(ChatRequest, event=responses.ChatChunk),
)
@recorded
async def chat(http: HTTPRequest, context: Context) -> Response:
    body = await context.bodies.parse(http, ChatRequest)
    answering, model, state = context.answering, context.model, context.engine.state
    answering.check(body.model)
    output = ChatOutput.from_body(body, model.formats)
    prompt = await answering.prompts.for_chat(http, body, state)
    output = output.after(prompt.token_ids, model.tokenizer)
    dialect = ChatDialect(output, ReasoningCounter(model.tokenizer.count), *answer_role(body))
    return await _answer(http, context, body, [prompt], dialect, output.grammar())


@router.post(
    "/v1/embeddings",
    summary="Computes embeddings of texts, normalised by default",
    response_model=responses.EmbeddingResponse,
    openapi_extra=read_by_handler(EmbeddingRequest),
)
@recorded
async def embeddings(http: HTTPRequest, context: Context) -> Response:
    body = await context.bodies.parse(http, EmbeddingRequest)
    context.answering.check(body.model, generates=False)
    check_task(context.engine.state.pooling, GENERATE, "embed")
    format = EmbeddingFormat.from_body(body, context.engine.state)
    return await embed(http, context, body, "embd", format.encode, format.params)


async def _answer(
    http: HTTPRequest,
    context: AppContext,
    body: CompletionRequest | ChatRequest,
    prompts: list[Prompt],
    dialect: Dialect,
    structured: StructuredOutputParams | None,
) -> Response:
    """Return the response; that of a stream when the first outputs have decided its status. Raises: APIError"""
    answering = context.answering
    submissions = await answering.submissions(body, prompts)
    shared = answering.shared(http, body, structured=structured, media=prompts[0].media)
    request, head = AnswerRequest(http, body, shared, submissions), answering.head(body, dialect.prefix)
    if body.stream:
        first_fields = {"prompt_token_ids": prompts[0].token_ids} if body.return_token_ids else {}
        options = body.stream_options or StreamOptions()
        encoder = EventEncoder(dialect, head, options, request.usage, first_fields)
        return await answering.streamed(request, encoder)
    chunks, generation = await answering.whole(request)
    scored = None
    if body.prompt_logprobs is not None:
        scored = await asyncio.to_thread(generation.prompt_logprobs)  # a long prompt has many
    usage = request.usage.to_json()
    answer = await answering.built(chunks, lambda: dialect.answer(head, chunks, usage, scored))
    return Response(msgspec.json.encode(answer), media_type="application/json")
