"""The form in which a template expects tool calls and their results; templates differ, and clients know one form."""

import hashlib
import json
import re
from itertools import product
from typing import Any, NamedTuple

Message = dict[str, Any]
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


class CallForm(NamedTuple):
    no_content: str | None
    """Content of a message with calls and without text. Some templates show calls only if it is none."""
    as_text: bool
    """True: the arguments are the text of an object, else the object."""
    short_ids: bool
    """True: ids have nine letters and digits. Mistral's templates refuse others, which come from forced calls,
    `/v1/responses` and other servers."""

    def of(self, messages: list[Message]) -> list[Message]:
        """Return the messages in this form. Their calls have objects as arguments."""
        return messages if self == FORMS[0] else [self._message(message) for message in messages]

    def _message(self, message: Message) -> Message:
        changed: Message = {}
        if "tool_call_id" in message:
            changed["tool_call_id"] = self._id(message["tool_call_id"])
        if "tool_calls" in message:
            changed["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
            changed["content"] = message["content"] or self.no_content
        return message | changed

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if self.as_text:
            function = function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        return call | {"id": self._id(call["id"]), "function": function}

    def _id(self, given: str) -> str:
        if not self.short_ids or _SHORT_ID.fullmatch(given):
            return given
        return hashlib.sha256(given.encode()).hexdigest()[:9]


FORMS = tuple(CallForm(*fields) for fields in product(("", None), (False, True), (False, True)))
"""The first is the one that most templates expect."""
