"""Answers in the form of the Responses API, whole and as events."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from services.frontend.errors import GONE, APIError
from services.frontend.openai.answers.chat_output import AnswerParser
from services.frontend.openai.answers.chunk import ChoiceWriter, Chunk
from services.frontend.openai.answers.events import one_line
from services.frontend.openai.answers.usage import ReasoningCounter, UsageCounter
from services.frontend.parsing.events import Reasoning
from services.frontend.responses_api.items import OutputItems
from services.frontend.responses_api.responses import (
    ResponseFailure,
    ResponseHead,
    ResponseObject,
    ResponseStatus,
    ResponsesUsage,
)
from services.frontend.responses_api.schemas import ResponsesRequest

JSON = dict[str, Any]
_OPENING = ("response.created", "response.in_progress")
"""Types of the first events of a stream."""
END_OF_EVENT = b"\n\n"
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""OpenAI's codes of the errors of failed responses; others are a server_error."""


def head_json(body: ResponsesRequest, id: str, model: str, is_stored: bool, created: int) -> ResponseHead:
    """Return the fields of a response that its request decides. `created`: seconds since 1970."""
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text is not None else {}
    effort = body.reasoning.effort if body.reasoning is not None else None
    choice = body.tool_choice
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "model": model,
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [
            {"parameters": None, "strict": None, **tool.model_dump(exclude_none=True)} for tool in body.tools or ()
        ],
        "top_logprobs": 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


class ResponseEvents(ChoiceWriter):
    """Builds one response, which has one choice, and writes its events, if it is streamed.

    Args:
        head: see `head_json`
        count_tokens: returns the number of tokens of a text.
    """

    def __init__(
        self, head: ResponseHead, parser: AnswerParser, usage: UsageCounter, count_tokens: Callable[[str], int]
    ) -> None:
        self._head, self._parser, self.usage, self._reasoning = head, parser, usage, ReasoningCounter(count_tokens)
        self.on_end: Callable[[ResponseObject], None] = lambda _: None
        """Called with the response before its last event."""
        self.on_chunk: Callable[[], None] = lambda: None
        """Called when a chunk becomes events."""
        self._items = OutputItems(head["id"])
        self._finish: str | None = None
        self._initial = self.to_json()
        self._number = len(_OPENING)  # the first items are encoded before `opening`

    def push(self, chunk: Chunk) -> list[JSON]:
        """Add a chunk; return the events of the items."""
        is_last = chunk.finish is not None
        parsed = self._parser.push(chunk.text, is_last=is_last)
        for found in parsed:
            if isinstance(found, Reasoning):
                self._reasoning.add(found.text)
        events = self._items.push(parsed)
        if is_last:
            self._finish = chunk.finish
            self._reasoning.end()
            events += self._items.end("incomplete" if chunk.finish == "length" else "completed")
        return events

    def to_json(self, error: APIError | None = None) -> ResponseObject:
        """Return the response as it is now, or, with an error, as it ends."""
        is_ended = self._finish is not None
        is_incomplete = self._finish == "length"
        status: ResponseStatus = "incomplete" if is_incomplete else "completed" if is_ended else "in_progress"
        if self._head["background"] and not is_ended and not self._items.items:
            status = "queued"
        if error is not None:
            status = "cancelled" if error.status == GONE else "failed"
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": _failure(error) if error is not None and status == "failed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "output": [*self._items.items],
            "usage": self._usage_json() if is_ended else None,
        }

    def _usage_json(self) -> ResponsesUsage:
        counted = self.usage.to_json()
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": self.usage.num_cached or 0, "cache_write_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning.num_tokens},
            "total_tokens": counted["total_tokens"],
        }

    def next_choice(self) -> "ResponseEvents":
        return self

    def opening(self) -> bytes:
        running: ResponseObject = {**self._initial, "status": "in_progress"}
        responses = zip(_OPENING, (self._initial, running), strict=True)
        events = [{"type": kind, "response": response} for kind, response in responses]
        return b"".join(_event(event, number) for number, event in enumerate(events))

    def chunk(self, chunk: Chunk) -> bytes:
        self.on_chunk()
        return self._encoded(self.push(chunk))

    def closing(self) -> bytes:
        response = self.to_json()
        return self._ending(f"response.{response['status']}", response)

    def error(self, error: APIError) -> bytes:
        """Return the last event; OpenAI has none of its own for a cancelled response."""
        return self._ending("response.failed", self.to_json(error))

    def _ending(self, kind: str, response: ResponseObject) -> bytes:
        self.on_end(response)
        return self._encoded([{"type": kind, "response": response}])

    def _encoded(self, events: list[JSON]) -> bytes:
        first, self._number = self._number, self._number + len(events)
        return b"".join(_event(event, number) for number, event in enumerate(events, first))


def _event(event: JSON, number: int) -> bytes:
    numbered = {"type": event["type"], "sequence_number": number, **event}
    data = one_line(msgspec.json.encode(numbered))
    return b"event: %b\ndata: %b%b" % (event["type"].encode(), data, END_OF_EVENT)


def _failure(error: APIError) -> ResponseFailure:
    return {"code": _CODES.get(error.status, "server_error"), "message": error.message}


def joined(events: Iterable[bytes]) -> JSON:
    """Return the response that these first events of a stream describe, as it was when the last one was written."""
    response: JSON = {}
    items: list[JSON] = []
    for encoded in events:
        event = msgspec.json.decode(encoded.split(b"\ndata: ", 1)[1])
        match event["type"]:
            case "response.created":
                response = event["response"]
            case "response.output_item.added":
                items.append(event["item"])
            case "response.output_item.done":
                items[-1] = event["item"]
            case "response.content_part.added":
                items[-1]["content"].append(event["part"])
            case "response.function_call_arguments.delta":
                items[-1]["arguments"] += event["delta"]
            case kind if kind.endswith("_text.delta"):
                items[-1]["content"][0]["text"] += event["delta"]
    return {**response, "status": "in_progress" if items else response["status"], "output": items}


def failed_event(response: JSON, error: APIError, number: int) -> tuple[bytes, bytes]:
    """Return the event that ends a response of which no more is known than `joined` returns, and the response."""
    content = {**response, "status": "failed", "error": _failure(error)}
    return _event({"type": "response.failed", "response": content}, number), msgspec.json.encode(content)
