"""/v1/responses: OpenAI's Responses API."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, Self

import msgspec
from fastapi import APIRouter, Path, Query
from msgspec.structs import replace
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse

from protocol.codec import pack, unpack
from protocol.requests import GenerateRequest
from protocol.sampling import SamplingParams
from services.frontend.context import AppContext, Context, recorded
from services.frontend.errors import GONE, APIError, internal_error, invalid
from services.frontend.model import ServedModel
from services.frontend.openai.answering import NOTHING, OTHER_EVENTS, Answering, AnswerRequest
from services.frontend.openai.answers.chat_output import AnswerParser, ChatOutput
from services.frontend.openai.answers.usage import UsageCounter
from services.frontend.openai.parameters.body import decoded, validated
from services.frontend.openai.prompts.conversation import media_files
from services.frontend.openai.prompts.prompt import Prompt
from services.frontend.openai.schemas.requests import ChatRequest
from services.frontend.openapi import GUARDED, WITH_BODY, errors, read_by_handler
from services.frontend.responses_api import responses
from services.frontend.responses_api.answers import ResponseEvents, head_json
from services.frontend.responses_api.background import OwnRun, Run
from services.frontend.responses_api.conversation import chat_request, input_items, with_parts
from services.frontend.responses_api.files import Orphan, ResponseFiles, Stored, conversation_of, run_of
from services.frontend.responses_api.items import new_id
from services.frontend.responses_api.response_file import Origin, StoredHead
from services.frontend.responses_api.schemas import Item, ResponsesRequest

log = logging.getLogger("runahead.frontend")

router = APIRouter(prefix="/v1/responses")
_STORED = errors(*GUARDED, 400, 404)
_FIELDS = {"messages": "input", "max_completion_tokens": "max_output_tokens", "text.format": "text"}
"""Fields of this body, under the names that errors give them."""
ResponseId = Annotated[str, Path(max_length=512)]


@router.get(
    "/{id}",
    summary="A stored response; with stream, its events behind starting_after and those that follow",
    response_model=responses.ResponseObject,
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
    found = _found(http, context, id)
    if stream:
        return _events(run_of(found, "stream"), -1 if starting_after is None else starting_after)
    if starting_after is not None:
        raise invalid("starting_after is only allowed when stream is true", "starting_after")
    return Response(found.response, media_type="application/json")


@router.post(
    "/{id}/cancel",
    summary="Cancels a response with background, if it has not ended",
    response_model=responses.ResponseObject,
    responses=_STORED,
)
async def cancel(http: HTTPRequest, context: Context, id: ResponseId) -> Response:
    run = run_of(_found(http, context, id))
    await run.cancel()
    return Response(run.response, media_type="application/json")


@router.delete("/{id}", summary="Deletes a stored response", responses=_STORED, operation_id="delete_v1_responses_id")
async def delete(http: HTTPRequest, context: Context, id: ResponseId) -> responses.DeletedResponse:
    _required(context.responses).delete(http.state.tenant, id)
    return {"id": id, "object": "response", "deleted": True}


@router.get("/{id}/input_items", summary="Items of the request of a stored response", responses=_STORED)
async def list_input_items(
    http: HTTPRequest,
    context: Context,
    id: ResponseId,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str | None, Query(max_length=512)] = None,
) -> responses.InputItemList:
    """The latest item is first, unless `order` is asc; the items behind the one with the id `after`."""
    items = _found(http, context, id).head.given()
    written = [with_parts(item.model_dump(mode="json", exclude_none=True)) for item in items]
    data = [{**item, "id": f"{id}_{number}"} for number, item in enumerate(written)]
    if order == "desc":
        data.reverse()
    if after is not None:
        ids = [item["id"] for item in data]
        if after not in ids:
            raise invalid("after: this response has no such item", "after")
        data = data[ids.index(after) + 1 :]
    page = data[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(data) > limit}


def _found(http: HTTPRequest, context: AppContext, id: str, param: str | None = None) -> Stored:
    """Return a stored response. One of a lost frontend goes on here. Raises: APIError"""
    go_on = partial(_go_on, http, context)
    return _required(context.responses, param).get(http.state.tenant, id, param, go_on)


def _required(store: ResponseFiles | None, param: str | None = None) -> ResponseFiles:
    """Raises: APIError"""
    if store is None:
        code = "previous_response_not_found" if param else "response_not_found"
        raise APIError(404, "this server keeps no responses (--no-response-store)", param, code)
    return store


def _events(run: Run, after: int) -> Response:
    headers = {"cache-control": "no-cache"}
    return StreamingResponse(run.behind(after), 200, headers, "text/event-stream")


@dataclass(frozen=True)
class _Turn:
    """A request with the chat that has the same meaning."""

    given: ResponsesRequest
    history: Sequence[Item]
    body: ChatRequest
    output: ChatOutput

    @classmethod
    def make(cls, given: ResponsesRequest, history: Sequence[Item], model: ServedModel) -> Self:
        """Raises: APIError"""
        body = chat_request(given, history)
        return cls(given, history, body, ChatOutput.from_body(body, model.formats))

    def head(self, origin: Origin | None = None) -> StoredHead:
        """Return what is stored before the answer."""
        return StoredHead.of(self.history, input_items(self.given), origin)


@router.post(
    "",
    summary="Continues a conversation, in the form of items",
    response_model=responses.ResponseObject,
    responses=errors(*WITH_BODY),
    openapi_extra=read_by_handler(ResponsesRequest, event=responses.ResponseStreamEvent),
)
@recorded
async def create(http: HTTPRequest, context: Context) -> Response:
    with _own_names():
        return await _create(http, context)


@router.post(
    "/input_tokens",
    summary="Counts the tokens of a conversation in the form of items",
    responses=errors(*WITH_BODY),
    openapi_extra=read_by_handler(ResponsesRequest),
)
async def count_input_tokens(http: HTTPRequest, context: Context) -> responses.InputTokens:
    given = await context.bodies.parse(http, ResponsesRequest)
    context.model.adapter(given.model)
    with _own_names():
        turn = _turn(http, context, given)
        turn.output.grammar()  # refuses what the body contradicts
        count = await context.answering.count_tokens(http, turn.body)
    return {"object": "response.input_tokens", "input_tokens": count}


@contextlib.contextmanager
def _own_names() -> Iterator[None]:
    """Let errors name the fields of this body where they name those of the chat. Raises: APIError"""
    try:
        yield
    except APIError as error:
        error.param = _FIELDS.get(error.param or "", error.param)
        raise


async def _create(http: HTTPRequest, context: AppContext) -> Response:
    """Raises: APIError, which may name a field of the chat"""
    given = await context.bodies.parse(http, ResponsesRequest)
    answering, model, state = context.answering, context.model, context.engine.state
    answering.check(given.model)
    turn = _turn(http, context, given)
    prompt = await answering.prompts.for_chat(http, turn.body, state)
    submissions = await answering.submissions(turn.body, [prompt])
    store = context.responses if given.store is not False else None
    id, tenant, name, created = (new_id("resp"), http.state.tenant, given.model or model.names[0], int(time.time()))
    if given.background:
        params = msgspec.msgpack.encode(submissions[0][1])
        text = (await http.body()).decode()
        origin = Origin(text, name, created, pack(prompt.token_ids), params, model.adapter(given.model))
        run = _required(store).new_run(tenant, id, turn.head(origin))
        _start(http, context, turn, id, origin, run)
        return _events(run, -1) if given.stream else Response(run.response, media_type="application/json")
    head = head_json(given, id, name, store is not None, created)
    answer, shared = _answer(http, context, turn, head, prompt)
    request = AnswerRequest(http, turn.body, shared, submissions, answer.usage)
    keep = partial(_keep, store, tenant, turn)
    if given.stream:
        answer.on_end = keep
        return await answering.streamed(request, answer)
    (whole,), _ = await answering.whole(request)

    def build() -> responses.ResponseObject:
        answer.push(whole)
        return answer.to_json()

    content = await answering.built([whole], build)
    keep(content)
    return Response(msgspec.json.encode(content), media_type="application/json")


def _turn(http: HTTPRequest, context: AppContext, given: ResponsesRequest) -> _Turn:
    """Raises: APIError"""
    if given.background and (context.responses is None or given.store is False):
        raise invalid("background needs a stored response: leave out store and --no-response-store", "background")
    turn = _Turn.make(given, _history(http, context, given), context.model)
    if given.background and media_files(turn.body):
        raise invalid("background is not served with images", "background")
    return turn


def _answer(
    http: HTTPRequest, context: AppContext, turn: _Turn, head: responses.ResponseHead, prompt: Prompt
) -> tuple[ResponseEvents, GenerateRequest]:
    tokenizer, given = context.model.tokenizer, turn.given
    output = turn.output.after(prompt.token_ids, tokenizer)
    parser = AnswerParser(output, eager=bool(given.stream or given.background))
    answer = ResponseEvents(head, parser, UsageCounter(), tokenizer.count)
    return answer, context.answering.shared(http, turn.body, structured=output.grammar(), media=prompt.media)


def _start(
    http: HTTPRequest,
    context: AppContext,
    turn: _Turn,
    id: str,
    origin: Origin,
    run: OwnRun,
    orphan: Orphan | None = None,
) -> None:
    """Generate a response apart from its connection.

    Args:
        orphan: what another frontend has done of it.

    Raises: APIError
    """
    answering, store = context.answering, _required(context.responses)
    prompt = Prompt(unpack(origin.prompt).tolist())
    params = msgspec.msgpack.decode(origin.params, type=SamplingParams)
    head = head_json(turn.given, id, origin.model, True, origin.created)
    answer, shared = _answer(http, context, turn, head, prompt)
    opening = answer.opening()
    delivered = NOTHING if orphan is None else orphan.content.delivered
    if orphan is not None and orphan.content.opening != opening:
        raise APIError(500, OTHER_EVENTS)
    http.state.summary.is_detached = True
    shared = replace(shared, lora=origin.lora or shared.lora)
    request = AnswerRequest(http, turn.body, shared, [(prompt, params)], answer.usage)
    generating = answering.generation(request, answer.next_choice, delivered)
    with contextlib.ExitStack() as stack:
        generation = stack.enter_context(generating)
        run.start(answer, generation, context.engine.ledger, delivered)
        if orphan is None:
            run.write(opening)
        store.begin(run, _finish(http, answering, run, stack.pop_all().close))


def _go_on(http: HTTPRequest, context: AppContext, orphan: Orphan) -> None:
    """Go on with the response of a lost frontend. Raises: APIError, if that may work later"""
    http = HTTPRequest({**http.scope, "path": router.prefix})  # its log line and its trace are those of the route
    try:
        context.answering.check(None)
        context.answering.begin_record(http)
        given = validated(decoded(orphan.origin.body.encode()), ResponsesRequest)
        turn = _Turn.make(given, orphan.content.head.history, context.model)
        _start(http, context, turn, orphan.id, orphan.origin, orphan.run, orphan)
    except Exception as error:
        if isinstance(error, APIError) and error.status in (429, 503):
            orphan.run.release()
            raise
        if not isinstance(error, APIError):
            log.exception("a response of a lost frontend cannot go on: id=%s", orphan.id)
            error = internal_error()
        orphan.fail(error)


async def _finish(http: HTTPRequest, answering: Answering, run: OwnRun, close: Callable[[], None]) -> None:
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
    return conversation_of(_found(http, context, given.previous_response_id, "previous_response_id"))


def _keep(store: ResponseFiles | None, tenant: str, turn: _Turn, response: responses.ResponseObject) -> None:
    """Store a response, if it is whole. `store`: None, if the response is not kept."""
    if store is not None and response["status"] in ("completed", "incomplete"):
        store.add(tenant, turn.head(), response)
