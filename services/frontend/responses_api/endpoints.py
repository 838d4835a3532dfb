"""/v1/responses: OpenAI's Responses API."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import TypeAdapter
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from services.frontend.errors import APIError
from services.frontend.openai.answering import Answering
from services.frontend.openai.answers.chat_output import ChatOutput
from services.frontend.openai.answers.usage import UsageCounter
from services.frontend.openai.answers.writers import AnswerCollector
from services.frontend.openai.parameters.body import BodyParser
from services.frontend.openai.parameters.structured import structured_params
from services.frontend.responses_api.answers import ResponseEvents, ResponseInProgress, head_json
from services.frontend.responses_api.conversation import chat_request, input_items
from services.frontend.responses_api.items import new_id
from services.frontend.responses_api.schemas import Item, ResponsesRequest
from services.frontend.responses_api.store import ResponseStore

PATH = "/v1/responses"
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


class ResponsesEndpoints:
    """Handlers of the endpoints.

    Args:
        store: None, if answers are not kept.
    """

    def __init__(self, answering: Answering, bodies: BodyParser, store: ResponseStore | None) -> None:
        self._answering, self._bodies, self._store = answering, bodies, store

    def add_to(self, app: FastAPI) -> None:
        app.post(PATH)(self.create)
        app.get(PATH + "/{id}")(self.retrieve)
        app.delete(PATH + "/{id}")(self.delete)
        app.get(PATH + "/{id}/input_items")(self.input_items)

    async def create(self, http: HTTPRequest) -> Response:
        return await self._answering.recorded(http, self._create(http))

    async def retrieve(self, http: HTTPRequest, id: str) -> Response:
        found = self._required_store().get(http.state.tenant, id)
        return Response(msgspec.json.encode(found.response), media_type="application/json")

    async def delete(self, http: HTTPRequest, id: str) -> Response:
        self._required_store().delete(http.state.tenant, id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    async def input_items(self, http: HTTPRequest, id: str) -> Response:
        items = self._required_store().get(http.state.tenant, id).input
        data = [{"id": f"{id}_{number}", **item} for number, item in enumerate(items)]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
        return JSONResponse({"object": "list", "data": data, **ends, "has_more": False})

    def _required_store(self, param: str | None = None) -> ResponseStore:
        """Raises: APIError"""
        if self._store is None:
            code = "previous_response_not_found" if param else "response_not_found"
            raise APIError(404, "this server keeps no responses (--no-response-store)", param, code)
        return self._store

    async def _create(self, http: HTTPRequest) -> Response:
        given = await self._bodies.parse(http, ResponsesRequest)
        answering = self._answering
        answering.check(given.model)
        history = self._history(http, given)
        body, model, state = chat_request(given, history), answering.model, answering.engine.state
        output = ChatOutput.from_body(body, model.formats)
        prompt = await answering.prompts.for_chat(body, state.vocab_size, state.max_model_len)
        start = output.reasoning_start(prompt.token_ids, model.tokenizer)
        request = answering.context(http, body, output.grammar(structured_params(body), start))
        submissions = await answering.submissions(body, [prompt])
        is_stored = self._store is not None and given.store is not False
        head = head_json(
            given, new_id("resp"), given.model or model.names[0], is_stored, given.metadata or {}
        )
        usage = UsageCounter()
        parser = output.parser(start, eager=bool(given.stream))
        answer = ResponseInProgress(
            head, parser, usage, lambda text: len(model.tokenizer.encode_rendered(text))
        )
        keep = self._keeper(http.state.tenant, history, input_items(given), is_stored)
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

    def _history(self, http: HTTPRequest, given: ResponsesRequest) -> Sequence[Item]:
        """Return the items of the earlier turns. Raises: APIError"""
        if given.previous_response_id is None:
            return ()
        param = "previous_response_id"
        return self._required_store(param).get(http.state.tenant, given.previous_response_id, param).items

    def _keeper(
        self, tenant: str, history: Sequence[Item], given: Sequence[Item], is_stored: bool
    ) -> Callable[[dict[str, Any]], None]:
        """Return a function that stores a whole response, if the request wants that."""

        def keep(response: dict[str, Any]) -> None:
            if self._store is not None and is_stored:
                answered = _ITEMS.validate_python(response["output"])
                self._store.add(tenant, response, (*history, *given, *answered), given)

        return keep
