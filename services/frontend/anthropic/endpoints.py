"""/v1/messages and /v1/messages/count_tokens: Anthropic's dialect of a chat."""

import uuid

import msgspec
from fastapi import FastAPI
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from services.frontend.anthropic.answers import MessageEvents, message_json
from services.frontend.anthropic.conversation import chat_request
from services.frontend.anthropic.schemas import CountTokensRequest, MessagesRequest
from services.frontend.errors import ANTHROPIC_PREFIX
from services.frontend.openai.answering import Answering
from services.frontend.openai.answers.chat_output import ChatOutput
from services.frontend.openai.answers.usage import UsageCounter
from services.frontend.openai.answers.writers import AnswerCollector
from services.frontend.openai.parameters.body import BodyParser


class MessagesEndpoints:
    """Handlers of the endpoints."""

    def __init__(self, answering: Answering, bodies: BodyParser) -> None:
        self._answering = answering
        self._bodies = bodies

    def add_to(self, app: FastAPI) -> None:
        app.post(ANTHROPIC_PREFIX)(self.messages)
        app.post(f"{ANTHROPIC_PREFIX}/count_tokens")(self.count_tokens)

    async def messages(self, http: HTTPRequest) -> Response:
        return await self._answering.recorded(http, self._message(http))

    async def count_tokens(self, http: HTTPRequest) -> Response:
        given = await self._bodies.parse(http, CountTokensRequest)
        self._answering.check_model(given.model)
        prompts = self._answering.prompts
        ids = await prompts.encode(await prompts.rendered(chat_request(given)), add_special_tokens=False)
        return Response(msgspec.json.encode({"input_tokens": len(ids)}), media_type="application/json")

    async def _message(self, http: HTTPRequest) -> Response:
        given = await self._bodies.parse(http, MessagesRequest)
        answering = self._answering
        answering.check(given.model)
        body, model, state = chat_request(given), answering.model, answering.engine.state
        output = ChatOutput.from_body(body, model.formats)
        prompt = await answering.prompts.for_chat(body, state.vocab_size, state.max_model_len)
        start = output.reasoning_start(prompt.token_ids, model.tokenizer)
        request = answering.context(http, body, output.grammar(None, start))
        submissions = await answering.submissions(body, [prompt])
        head = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": given.model or model.names[0],
        }
        usage = UsageCounter()
        parser = output.parser(start, eager=bool(given.stream))
        if given.stream:
            encoder = MessageEvents(head, parser, usage, http.state.request_id)
            return await answering.streamed(http, body, request, submissions, usage, encoder)
        collector = AnswerCollector()
        with answering.generation(http, body, request, submissions, usage, collector) as generation:
            await generation.response.last()
        (whole,) = collector.answers()
        content = message_json(head, whole, parser, usage)
        return Response(msgspec.json.encode(content), media_type="application/json")
