"""Fields of a body that are not served: known ones are refused by name, unknown ones are ignored with a notice."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel

from services.frontend.anthropic.schemas import CountTokensRequest
from services.frontend.errors import invalid
from services.frontend.openai.schemas.requests import (
    HINTS,
    NEUTRAL_IN_MESSAGE,
    ChatRequest,
    MessageParam,
    Neutral,
    unserved_in,
)
from services.frontend.responses_api.schemas import (
    FunctionCallOutput,
    InputMessage,
    ReasoningItem,
    ResponsesRequest,
)

log = logging.getLogger("runahead.frontend")

UnknownFieldMode = Literal["warn", "refuse", "ignore"]
MAX_NAMED = 16
"""Names in the header and in a log line."""
MAX_LOGGED = 1024
"""Distinct combinations of names that are logged, once each."""
_PRINTABLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@cache
def unserved_of(kind: type[BaseModel]) -> Neutral:
    """Return the known parameters that a kind of body does not serve, with their neutral values."""
    return kind.unserved if issubclass(kind, CountTokensRequest | ResponsesRequest) else unserved_in(kind)


class ExtraFields:
    """The rule for fields that a body's model does not have."""

    def __init__(self, mode: UnknownFieldMode) -> None:
        self._mode = mode
        self._logged: set[tuple[str, ...]] = set()

    def check(self, body: BaseModel, request_id: str) -> list[str]:
        """Return the names of ignored fields for the response's header, at most MAX_NAMED.

        Raises: APIError, for a known field that is not served with its value; in the mode "refuse" for any unknown one
        """
        unknown = dict.fromkeys(_unknown(body, refuses=self._mode == "refuse"))
        if not unknown or self._mode != "warn":
            return []
        named = [name for name in unknown if _PRINTABLE.fullmatch(name)][:MAX_NAMED]
        self._warn(named, len(unknown) - len(named), request_id)
        return named

    def _warn(self, named: list[str], others: int, request_id: str) -> None:
        """Write one line. A combination of names is logged once, as a client sends it with each request."""
        key = (*named, str(others))
        if key in self._logged or len(self._logged) >= MAX_LOGGED:
            return
        self._logged.add(key)
        more = [f"{others} more"] if others else []
        log.warning(
            "unknown parameters ignored (logged once): request_id=%s: %s; --unknown-parameters refuse refuses them",
            request_id, ", ".join([*named, *more]),
        )  # fmt: skip


def _unknown(body: BaseModel, refuses: bool) -> Iterator[str]:
    """Yield the names of unknown fields, with "messages." before those of messages. Raises: APIError"""
    yield from _not_served(body.model_extra or {}, unserved_of(type(body)), "", "", refuses)
    if isinstance(body, CountTokensRequest):
        yield from _of_anthropic(body, refuses)
    if isinstance(body, ResponsesRequest):
        yield from _of_responses(body, refuses)
    for index, message in enumerate(body.messages if isinstance(body, ChatRequest) else ()):
        if message.model_extra:
            at = f"messages.{index}."
            yield from _not_served(message.model_extra, NEUTRAL_IN_MESSAGE, at, "messages.", refuses)
        for extra, path in _nested(message):
            yield from _not_served(extra, {}, f"messages.{index}.{path}", f"messages.{path}", refuses)


def _of_anthropic(body: CountTokensRequest, refuses: bool) -> Iterator[str]:
    for tool in body.tools or ():
        yield from _not_served(tool.model_extra or {}, {}, "tools.", "tools.", refuses)
    for index, message in enumerate(body.messages):
        at = f"messages.{index}."
        yield from _not_served(message.model_extra or {}, {}, at, "messages.", refuses)
        for block in message.content if isinstance(message.content, list) else ():
            yield from _not_served(block.model_extra or {}, {}, f"{at}content.", "messages.content.", refuses)


def _of_responses(body: ResponsesRequest, refuses: bool) -> Iterator[str]:
    for tool in body.tools or ():
        yield from _not_served(tool.model_extra or {}, {}, "tools.", "tools.", refuses)
    for index, item in enumerate(body.input if isinstance(body.input, list) else ()):
        at = f"input.{index}."
        yield from _not_served(item.model_extra or {}, {}, at, "input.", refuses)
        parts: Sequence[BaseModel] | str = ()
        match item:
            case InputMessage():
                parts = item.content
            case FunctionCallOutput():
                parts = item.output
            case ReasoningItem():
                parts = [*item.summary, *(item.content or ())]
        for part in parts if not isinstance(parts, str) else ():
            yield from _not_served(part.model_extra or {}, {}, f"{at}content.", "input.content.", refuses)


def _nested(message: MessageParam) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the unknown fields of a message's parts and calls, with their path."""
    for part in message.content if isinstance(message.content, list) else ():
        if part.model_extra:
            yield part.model_extra, "content."
    for call in message.tool_calls or ():
        if call.model_extra:
            yield call.model_extra, "tool_calls."
        if call.function.model_extra:
            yield call.function.model_extra, "tool_calls.function."


def _not_served(
    extra: Mapping[str, Any], neutral: Neutral, within: str, prefix: str, refuses: bool
) -> Iterator[str]:
    """Yield `prefix` and name of the unknown fields. Raises: APIError, naming the first one that is refused

    Args:
        within: path of the object that has the fields, for errors.
    """
    for name, value in extra.items():
        allowed = neutral.get(name, ())
        if value is None or any(value == other and type(value) is type(other) for other in allowed):
            continue
        if name not in neutral and not refuses:
            yield prefix + name
            continue
        problem = f"is not supported with the value {value!r:.80}" if name in neutral else "is not known"
        hint = f" ({HINTS[name]})" if not within and name in HINTS else ""
        raise invalid(f"{within}{name:.80} {problem}; leave it out{hint}", (within or name).partition(".")[0])
