"""Answers in the form of the Messages API, whole and as events."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic_core import from_json, to_json

from services.frontend.anthropic.schemas import AnthropicUsage, MessageEnding, MessageHead, MessageResponse, StopReason
from services.frontend.errors import APIError, anthropic_body
from services.frontend.openai.answers.chat_output import AnswerParser
from services.frontend.openai.answers.chunk import ChoiceWriter, Chunk
from services.frontend.openai.answers.events import one_line
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


def complete_part(text: bytes) -> bytes:
    """Return what is complete of an object that was cut off, as Anthropic's client reads it from a stream."""
    try:
        return to_json(from_json(text, allow_partial=True), inf_nan_mode="null")
    except ValueError:  # such as half of a surrogate pair
        return b"{}"


def usage_json(usage: UsageCounter) -> AnthropicUsage:
    counted, cached = usage.to_json(), usage.num_cached or 0
    return {
        "input_tokens": counted["prompt_tokens"] - cached,
        "output_tokens": counted["completion_tokens"],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def event(content: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (content["type"].encode(), one_line(msgspec.json.encode(content)))


@dataclass
class MessageEvents(ChoiceWriter):
    """Builds one message, and writes its events, if it is streamed. It has one choice."""

    _head: MessageHead
    _parser: AnswerParser
    _usage: UsageCounter
    _request_id: str
    _blocks: list[JSON] = field(default_factory=list)
    """Content blocks; `input` of a tool's is the text of its arguments, as not all of JSON can be decoded."""
    _is_open: bool = False
    """True if the last block may grow."""
    _ending: MessageEnding = field(default_factory=lambda: MessageEnding(stop_reason="end_turn", stop_sequence=None))

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

    def chunk(self, chunk: Chunk) -> bytes:
        written = self._events(self._parser.push(chunk.text, is_last=chunk.finish is not None))
        if chunk.finish is not None:
            self._ending = stop_reason(chunk, self._parser.num_calls)
        return written

    def whole(self, chunk: Chunk) -> MessageResponse:
        """Return the message that this chunk is."""
        self.chunk(chunk)
        calls = (block for block in self._blocks if block["type"] == "tool_use")
        for index, block in enumerate(calls):
            text = block["input"].encode()
            block["input"] = msgspec.Raw(text if index < self._parser.num_calls else complete_part(text))
        return {**self._head, "content": self._blocks, **self._ending, "usage": usage_json(self._usage)}

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
                    parts.append(self._add("text", text))
                case Reasoning(text) if text:
                    parts.append(self._add("thinking", text, signature=""))
                case CallStart(_, id, name):
                    parts.append(self._begin({"type": "tool_use", "id": id, "name": name, "input": {}}))
                    self._blocks[-1]["input"] = ""
                case Arguments(_, text) if text:
                    self._blocks[-1]["input"] += text
                    parts.append(self._delta({"type": "input_json_delta", "partial_json": text}))
        return b"".join(parts)

    def _add(self, kind: str, text: str, **fields: str) -> bytes:
        """Add text to the block of this type that is open, or to a new one."""
        begun = b""
        if not self._is_open or self._blocks[-1]["type"] != kind:
            begun = self._begin({"type": kind, kind: "", **fields})
        self._blocks[-1][kind] += text
        return begun + self._delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, block: JSON) -> bytes:
        closed = self._close()
        self._blocks.append(block)
        self._is_open = True
        return closed + event({"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block})

    def _delta(self, delta: JSON) -> bytes:
        return event({"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta})

    def _close(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        return event({"type": "content_block_stop", "index": len(self._blocks) - 1})
