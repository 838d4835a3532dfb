"""/v1/responses: OpenAI's Responses API."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import msgspec
from fastapi import APIRouter, Path, Query
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse

from services.frontend.context import AppContext, Context
from services.frontend.errors import GONE, APIError, invalid
from services.frontend.openai.answering import Answering
from services.frontend.openai.answers.chat_output import ChatOutput
from services.frontend.openai.answers.usage import UsageCounter
from services.frontend.openai.answers.writers import AnswerCollector
from services.frontend.openai.parameters.structured import structured_params
from services.frontend.openapi import GUARDED, WITH_BODY, errors, read_by_handler
from services.frontend.responses_api.answers import ResponseEvents, ResponseInProgress, head_json
from services.frontend.responses_api.background import BackgroundRun
from services.frontend.responses_api.conversation import chat_request, input_items
from services.frontend.responses_api.items import new_id
from services.frontend.responses_api.responses import (
    DeletedResponse,
    InputItemList,
    ResponseObject,
    ResponseStreamEvent,
)
from services.frontend.responses_api.schemas import Item, ResponsesRequest
from services.frontend.responses_api.store import ResponseStore

router = APIRouter(prefix="/v1/responses")
_STORED = errors(*GUARDED, 400, 404)
ResponseId = Annotated[str, Path(max_length=512)]


@router.post(
    "",
    summary="Continues a conversation, in the form of items",
    response_model=ResponseObject,
    responses=errors(*WITH_BODY),
    openapi_extra=read_by_handler(ResponsesRequest, event=ResponseStreamEvent),
)
async def create(http: HTTPRequest, context: Context) -> Response:
    return await context.answering.recorded(http, _create(http, context))


@router.get(
    "/{id}",
    summary="A stored response; with stream, its events behind starting_after and those that follow",
    response_model=ResponseObject,
    responses=_STORED,
    operation_id="get_v1_responses_id",
)
async def retrieve(
    http: HTTPRequest,
    context: Context,
    id: ResponseId,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0, lt=2**31)] = None,
) -> Response:
    found = _required(context.responses).get(http.state.tenant, id)
    if stream:
        return _events(found.run("stream"), -1 if starting_after is None else starting_after)
    if starting_after is not None:
        raise invalid("starting_after is only allowed when stream is true", "starting_after")
    return Response(found.response, media_type="application/json")


@router.post(
    "/{id}/cancel",
    summary="Cancels a response with background, if it has not ended",
    response_model=ResponseObject,
    responses=_STORED,
)
async def cancel(http: HTTPRequest, context: Context, id: ResponseId) -> Response:
    run = _required(context.responses).get(http.state.tenant, id).run()
    await run.cancel()
    return Response(run.response, media_type="application/json")


@router.delete(
    "/{id}", summary="Deletes a stored response", responses=_STORED, operation_id="delete_v1_responses_id"
)
async def delete(http: HTTPRequest, context: Context, id: ResponseId) -> DeletedResponse:
    _required(context.responses).delete(http.state.tenant, id)
    return {"id": id, "object": "response", "deleted": True}


@router.get("/{id}/input_items", summary="Items of the request of a stored response", responses=_STORED)
async def list_input_items(http: HTTPRequest, context: Context, id: ResponseId) -> InputItemList:
    items = _required(context.responses).get(http.state.tenant, id).given()
    written = [item.model_dump(mode="json", exclude_none=True) for item in items]
    data = [{"id": f"{id}_{number}", **item} for number, item in enumerate(written)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"],
        "last_id": data[-1]["id"],
        "has_more": False,
    }


def _required(store: ResponseStore | None, param: str | None = None) -> ResponseStore:
    """Raises: APIError"""
    if store is None:
        code = "previous_response_not_found" if param else "response_not_found"
        raise APIError(404, "this server keeps no responses (--no-response-store)", param, code)
    return store


def _events(run: BackgroundRun, after: int) -> Response:
    headers = {"cache-control": "no-cache"}
    return StreamingResponse(run.events.behind(after), 200, headers, "text/event-stream")


async def _create(http: HTTPRequest, context: AppContext) -> Response:
    given = await context.bodies.parse(http, ResponsesRequest)
    answering, model, state = context.answering, context.model, context.engine.state
    answering.check(given.model)
    if given.background and (context.responses is None or given.store is False):
        raise invalid(
            "background needs a stored response: leave out store and --no-response-store", "background"
        )
    history = _history(http, context, given)
    body = chat_request(given, history)
    output = ChatOutput.from_body(body, model.formats)
    prompt = await answering.prompts.for_chat(body, state.vocab_size, state.max_model_len)
    start = output.reasoning_start(prompt.token_ids, model.tokenizer)
    request = answering.context(http, body, output.grammar(structured_params(body), start))
    submissions = await answering.submissions(body, [prompt])
    store = context.responses if given.store is not False else None
    name = given.model or model.names[0]
    head = head_json(given, new_id("resp"), name, store is not None, given.metadata or {})
    usage = UsageCounter()
    parser = output.parser(start, eager=bool(given.stream or given.background))
    answer = ResponseInProgress(head, parser, usage, lambda text: len(model.tokenizer.encode_rendered(text)))
    if given.background:
        run = BackgroundRun(answer, partial(_required(store).grow, http.state.tenant, answer.id))
        http.state.summary.is_detached = True
        with contextlib.ExitStack() as stack:
            generation = stack.enter_context(
                answering.generation(http, body, request, submissions, usage, run.encoder)
            )
            run.start(generation.response)
            _required(store).begin(http.state.tenant, answer.id, run, history, input_items(given))
            close = stack.pop_all().close
        task = asyncio.create_task(_finish(http, answering, run, close))
        context.tasks.add(task)
        task.add_done_callback(context.tasks.discard)
        return _events(run, -1) if given.stream else Response(run.response, media_type="application/json")
    keep = _keeper(store, http.state.tenant, history, input_items(given))
    if given.stream:
        encoder = ResponseEvents(answer, keep)
        return await answering.streamed(http, body, request, submissions, usage, encoder)
    collector = AnswerCollector()
    with answering.generation(http, body, request, submissions, usage, collector) as generation:
        await generation.response.last()
    (whole,) = collector.answers()
    answer.push(whole)
    content = answer.to_json()
    keep(content)
    return Response(msgspec.json.encode(content), media_type="application/json")


async def _finish(
    http: HTTPRequest, answering: Answering, run: BackgroundRun, close: Callable[[], None]
) -> None:
    """Generate a response with background, and record its end."""
    failure: APIError | None = APIError(GONE, "the response was cancelled")
    try:
        failure = await run.finish()
    finally:
        close()
        answering.record_end(http, failure)


def _history(http: HTTPRequest, context: AppContext, given: ResponsesRequest) -> Sequence[Item]:
    """Return the items of the earlier turns. Raises: APIError"""
    if given.previous_response_id is None:
        return ()
    param = "previous_response_id"
    return (
        _required(context.responses, param).get(http.state.tenant, given.previous_response_id, param).items()
    )


def _keeper(
    store: ResponseStore | None, tenant: str, history: Sequence[Item], given: Sequence[Item]
) -> Callable[[ResponseObject], None]:
    """Return a function that stores a whole response.

    Args:
        store: None, if the response is not kept.
    """

    def keep(response: ResponseObject) -> None:
        if store is not None and response["status"] in ("completed", "incomplete"):
            store.add(tenant, response, history, given)

    return keep
