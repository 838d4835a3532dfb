"""Answers in the form of the Messages API, whole and as events."""

from collections.abc import Mapping
from typing import Any

import msgspec

from services.frontend.anthropic.schemas import AnthropicUsage, MessageEnding, MessageHead, MessageResponse, StopReason
from services.frontend.errors import APIError, anthropic_body
from services.frontend.openai.answers.chunk import Chunk
from services.frontend.openai.answers.events import one_line
from services.frontend.openai.answers.tool_dialect import AnswerParser
from services.frontend.openai.answers.usage import UsageCounter
from services.frontend.parsing.events import Arguments, CallStart, Content, ParsedEvent, Reasoning

JSON = dict[str, Any]
_STOP_REASONS: dict[str, StopReason] = {"stop": "end_turn", "length": "max_tokens"}


def stop_reason(chunk: Chunk, num_calls: int) -> MessageEnding:
    """Return the fields that say why an answer ended."""
    if isinstance(chunk.stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": chunk.stop}
    is_call = chunk.finish == "stop" and num_calls > 0
    return {"stop_reason": "tool_use" if is_call else _STOP_REASONS[chunk.finish or "stop"], "stop_sequence": None}


def usage_json(usage: UsageCounter) -> AnthropicUsage:
    counted, cached = usage.to_json(), usage.num_cached or 0
    return {
        "input_tokens": counted["prompt_tokens"] - cached,
        "output_tokens": counted["completion_tokens"],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def message_json(head: MessageHead, whole: Chunk, parser: AnswerParser, usage: UsageCounter) -> MessageResponse:
    blocks: list[JSON] = []
    for event in parser.push(whole.text, is_last=True):
        match event:
            case Content(text) | Reasoning(text):
                kind, field = ("text", "text") if isinstance(event, Content) else ("thinking", "thinking")
                if not blocks or blocks[-1]["type"] != kind:
                    blocks.append({"type": kind, field: "", **({"signature": ""} if kind == "thinking" else {})})
                blocks[-1][field] += text
            case CallStart(_, id, name):
                blocks.append({"type": "tool_use", "id": id, "name": name, "input": ""})
            case Arguments(_, text):
                blocks[-1]["input"] += text
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = _arguments(block["input"])
    return {**head, "content": blocks, **stop_reason(whole, parser.num_calls), "usage": usage_json(usage)}


def _arguments(text: str) -> JSON:
    """Return the arguments of a call; those that the length limit cut off are not an object."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}


def event(content: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (content["type"].encode(), one_line(msgspec.json.encode(content)))


class MessageEvents:
    """Writes the events of one streamed message, which has one choice."""

    def __init__(self, head: MessageHead, parser: AnswerParser, usage: UsageCounter, request_id: str) -> None:
        self._head = head
        self._parser = parser
        self._usage = usage
        self._request_id = request_id
        self._index = -1
        """Index of the open content block."""
        self._open: str | None = None
        """Type of the open content block."""
        self._ending: MessageEnding = {"stop_reason": "end_turn", "stop_sequence": None}

    def next_choice(self) -> "MessageEvents":
        return self

    def opening(self) -> bytes:
        message = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**usage_json(self._usage), "output_tokens": 0},
        }
        return event({"type": "message_start", "message": message})

    def text(self, text: str) -> bytes:
        return self._events(self._parser.push(text, is_last=False))

    def chunk(self, chunk: Chunk) -> bytes:
        written = self._events(self._parser.push(chunk.text, is_last=chunk.finish is not None))
        if chunk.finish is not None:
            self._ending = stop_reason(chunk, self._parser.num_calls)
        return written

    def closing(self) -> bytes:
        delta = {"type": "message_delta", "delta": self._ending, "usage": usage_json(self._usage)}
        return self._close() + event(delta) + event({"type": "message_stop"})

    def error(self, error: APIError) -> bytes:
        return event(anthropic_body(error, self._request_id))

    def _events(self, parsed: list[ParsedEvent]) -> bytes:
        parts = []
        for found in parsed:
            match found:
                case Content(text) if text:
                    parts.append(self._in("text", {"type": "text", "text": ""}))
                    parts.append(self._delta({"type": "text_delta", "text": text}))
                case Reasoning(text) if text:
                    parts.append(self._in("thinking", {"type": "thinking", "thinking": "", "signature": ""}))
                    parts.append(self._delta({"type": "thinking_delta", "thinking": text}))
                case CallStart(_, id, name):
                    block = {"type": "tool_use", "id": id, "name": name, "input": {}}
                    parts += [self._close(), self._in("tool_use", block)]
                case Arguments(_, text) if text:
                    parts.append(self._delta({"type": "input_json_delta", "partial_json": text}))
        return b"".join(parts)

    def _in(self, kind: str, block: JSON) -> bytes:
        """Open a block, unless one of this type is open."""
        if self._open == kind:
            return b""
        closed = self._close()
        self._index += 1
        self._open = kind
        return closed + event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: JSON) -> bytes:
        return event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return event({"type": "content_block_stop", "index": self._index})
