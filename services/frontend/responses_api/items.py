"""Output items of an answer, and the events of a stream that describe how they grow."""

import secrets
from typing import Any

from services.frontend.parsing.events import Arguments, CallStart, Content, ParsedEvent, Reasoning

JSON = dict[str, Any]
_KINDS = {
    "message": ("msg", "output_text", "response.output_text"),
    "reasoning": ("rs", "reasoning_text", "response.reasoning_text"),
}
"""By type of item: prefix of its id, type of its one part, prefix of its events."""


def new_id(prefix: str) -> str:
    """Return an id with 128 random bits."""
    return f"{prefix}_{secrets.token_hex(16)}"


class OutputItems:
    """Builds the items of one answer. Every method returns events, without their sequence numbers.

    Args:
        response_id: the ids of the items follow from it, so that another frontend that goes on with the response makes
            the same ones.
    """

    def __init__(self, response_id: str) -> None:
        self.items: list[JSON] = []
        self._seed = response_id.rpartition("_")[2]
        self._is_open = False

    def _id(self, prefix: str) -> str:
        """Return the id of the next item."""
        return f"{prefix}_{self._seed}{len(self.items):04x}"

    def push(self, parsed: list[ParsedEvent]) -> list[JSON]:
        events: list[JSON] = []
        for found in parsed:
            match found:
                case Content(text) if text:
                    events += self._add_text("message", text)
                case Reasoning(text) if text:
                    events += self._add_text("reasoning", text)
                case CallStart(_, _, name):
                    call = {"id": self._id("fc"), "type": "function_call", "status": "in_progress"}
                    call |= {"call_id": self._id("call"), "name": name, "arguments": ""}
                    events += self._close("completed") + self._open(call)
                case Arguments(_, text) if text:
                    self.items[-1]["arguments"] += text
                    events.append(self._event("response.function_call_arguments.delta", delta=text))
        return events

    def end(self, status: str) -> list[JSON]:
        """Close the last item, with `status`. An answer without any item gets an empty message."""
        events = [] if self.items else self._begin("message")
        return events + self._close(status)

    def _add_text(self, kind: str, text: str) -> list[JSON]:
        _, part, name = _KINDS[kind]
        events: list[JSON] = []
        if not self._is_open or self.items[-1]["type"] != kind:
            events = self._close("completed") + self._begin(kind)
        self.items[-1]["content"][0]["text"] += text
        more: JSON = {"logprobs": []} if part == "output_text" else {}
        return [*events, self._event(f"{name}.delta", content_index=0, delta=text, **more)]

    def _begin(self, kind: str) -> list[JSON]:
        """Open an item whose content is one part."""
        prefix, part_type, _ = _KINDS[kind]
        item: JSON = {"id": self._id(prefix), "type": kind, "status": "in_progress", "content": []}
        part: JSON = {"type": part_type, "text": ""}
        if kind == "message":
            item, part = {**item, "role": "assistant"}, {**part, "annotations": [], "logprobs": []}
        else:
            item = {**item, "summary": []}
        events = self._open(item)
        item["content"].append(part)
        return [*events, self._event("response.content_part.added", content_index=0, part=dict(part))]

    def _open(self, item: JSON) -> list[JSON]:
        self.items.append(item)
        self._is_open = True
        copied = {**item, "content": []} if "content" in item else dict(item)
        return [{"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": copied}]

    def _close(self, status: str) -> list[JSON]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        events: list[JSON] = []
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._event("response.function_call_arguments.done", **done))
        else:
            (part,) = item["content"]
            name = _KINDS[item["type"]][2]
            more: JSON = {"logprobs": []} if item["type"] == "message" else {}
            events.append(self._event(f"{name}.done", content_index=0, text=part["text"], **more))
            events.append(self._event("response.content_part.done", content_index=0, part=part))
        done = {"output_index": len(self.items) - 1, "item": item}
        return [*events, {"type": "response.output_item.done", **done}]

    def _event(self, kind: str, **fields: object) -> JSON:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}
