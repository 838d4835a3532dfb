"""Request bodies: from bytes to checked fields."""

import asyncio
import codecs
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

import msgspec
import pydantic
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest

from services.frontend.errors import GONE, APIError, invalid, unknown_tool
from services.frontend.json_text import MAX_DEPTH, json_value
from services.frontend.openai.schemas.messages import AllowedTools
from services.frontend.openai.schemas.open_object import OpenObject
from services.frontend.openai.schemas.requests import BaseGenerationRequest, ChatRequest

log = logging.getLogger("runahead.frontend")

BODY_SECONDS = 30.0
"""Time limit for a client to send its body."""
MAX_ERRORS = 1000
"""Wrong values of a body that are described; more are only counted, as each description takes microseconds."""
MAX_NAMED = 16
"""Names in the header and in a log line."""
MAX_LOGGED = 1024
"""Distinct combinations of names that are logged, once each."""
_INDEX = re.compile(r"\.\d+\.")
_PRINTABLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
UnknownFieldMode = Literal["warn", "refuse", "ignore"]

B = TypeVar("B", bound=OpenObject)
C = TypeVar("C", bound=OpenObject)


class BodyParser:
    """Reads and checks bodies. Of fields that a body's model does not have, known ones are refused by name, and unknown
    ones are ignored with a notice: their names are stored as `state.ignored_parameters` of the request."""

    def __init__(self, mode: UnknownFieldMode) -> None:
        self._mode = mode
        self._logged: set[str] = set()

    async def parse(self, http: HTTPRequest, kind: type[B]) -> B:
        """Raises: APIError, naming the field that is wrong"""
        return self._checked(http, await read_object(http), kind)

    async def parse_prompt(self, http: HTTPRequest, chat: type[B], other: type[C]) -> B | C:
        """Parse a conversation, which has `messages`, or another prompt. Raises: APIError, as `parse`"""
        content = await read_object(http)
        return self._checked(http, content, chat) if "messages" in content else self._checked(http, content, other)

    def _checked(self, http: HTTPRequest, content: dict[str, Any], kind: type[B]) -> B:
        """Raises: APIError, naming the field that is wrong"""
        body = validated(content, kind)
        http.state.ignored_parameters = self.check(body, http.state.request_id)
        if isinstance(body, ChatRequest):
            keep_allowed_tools(body)
        return body

    def check(self, body: OpenObject, request_id: str) -> list[str]:
        """Return the names of ignored fields for the response's header, at most MAX_NAMED.

        Raises: APIError, for a known field that is not served with its value; in the mode "refuse" for any unknown one
        """
        unknown = dict.fromkeys(_unknown(body, refuses=self._mode == "refuse"))
        if not unknown or self._mode != "warn":
            return []
        named = [name for name in unknown if _PRINTABLE.fullmatch(name)][:MAX_NAMED]
        others = len(unknown) - len(named)
        shown = ", ".join([*named, f"{others} more"] if others else named)
        if shown not in self._logged and len(self._logged) < MAX_LOGGED:  # a client sends them with each request
            self._logged.add(shown)
            log.warning(
                "unknown parameters ignored (logged once): request_id=%s: %s; --unknown-parameters refuse refuses them",
                request_id, shown,
            )  # fmt: skip
        return named


def decoded(raw: bytes) -> dict[str, Any]:
    """Return the JSON object that a body is. Raises: APIError"""
    content = _json(raw)
    if not isinstance(content, dict):
        raise invalid("the request body must be a JSON object")
    return content


def validated(content: dict[str, Any], kind: type[B]) -> B:
    """Raises: APIError, naming the field that is wrong"""
    try:
        body = kind.model_validate(content)
    except pydantic.ValidationError as error:
        raise _named(error) from None
    if isinstance(body, BaseGenerationRequest) and body.stream_options is not None and not body.stream:
        raise invalid("stream_options is only allowed when stream is true", "stream_options")
    return body


def keep_allowed_tools(body: ChatRequest) -> None:
    """Leave only the tools that may be called, also for the prompt. Raises: APIError, if one is not among them"""
    if not isinstance(body.tool_choice, AllowedTools):
        return
    allowed = body.tool_choice.allowed_tools
    names = {tool.function.name for tool in allowed.tools}
    body.tools = [tool for tool in body.tools or () if tool.function.name in names]
    body.tool_choice = allowed.mode
    if missing := names - {tool.function.name for tool in body.tools}:
        raise unknown_tool(min(missing))


async def read_object(http: HTTPRequest) -> dict[str, Any]:
    """Return the JSON object that the body of a request is. Raises: APIError"""
    if (encoding := http.headers.get("content-encoding", "identity")) != "identity":
        raise APIError(415, f"a body with Content-Encoding {encoding!r:.99} is not read; send it uncompressed")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return decoded(await http.body())
    except TimeoutError:
        raise APIError(408, "the request body did not arrive in time") from None
    except ClientDisconnect:
        raise APIError(GONE, "the client closed the connection") from None


def _json(raw: bytes) -> Any:
    """Raises: APIError"""
    try:
        return json_value(raw.removeprefix(codecs.BOM_UTF8))
    except RecursionError:
        raise invalid(f"the request body is nested too deeply; at most {MAX_DEPTH} levels are possible") from None
    except UnicodeDecodeError:  # its text would show bytes as 0xff
        raise invalid("the request body is not valid UTF-8") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise invalid(f"the request body is not valid JSON: {error!s:.200}") from None


_PLAIN = {
    "missing": "this field is missing",
    "none_required": "this field is not supported here",
    "too_short": "at least {min_length} are needed, not {actual_length}",
    "too_long": "at most {max_length} are possible, not {actual_length}",
    "extra_forbidden": "there is no such field",
    "model_type": "this must be an object",
    "union_tag_not_found": "the field {discriminator} is missing",
    "int_parsing": "Input should be a valid integer",
    "float_parsing": "Input should be a valid number",
    "union_tag_invalid": "{tag!r:.100} is not supported here, only {expected_tags}",
}
"""Pydantic's type of an error -> message, where pydantic's own speaks of its validation."""


def problem(error: ErrorDetails) -> str:
    """Return what is wrong with a value, in a body or in a query."""
    plain = _PLAIN.get(error["type"])
    return plain.format_map(error.get("ctx", {})) if plain else error["msg"]


def _named(error: pydantic.ValidationError) -> APIError:
    """Return the most specific of the errors in the first bad field: that of a list's length, else the one at the
    deepest location, and among equals one of a value, as another type may be allowed."""
    if error.error_count() > MAX_ERRORS:
        return invalid(f"the request body has {error.error_count()} wrong values")
    errors = error.errors(include_url=False, include_input=False)
    field = str(errors[0]["loc"][0]) if errors[0]["loc"] else ""
    errors = [e for e in errors if not field or str(e["loc"][0]) == field]
    other_kinds = {e["loc"][:-1] for e in errors if e["loc"][-1:] == ("type",)}
    deepest = max(errors, key=lambda e: _specificity(e, is_other_kind=e["loc"][:-1] in other_kinds))
    where = ".".join(str(part) for part in (field, *deepest["loc"][1:]) if _is_name(part))
    text = problem(deepest)
    message = f"{where}: {text}" if where else text
    return invalid(message, field or None, logged=f"{field or 'the request body'}: {deepest['type']}")


def _specificity(error: ErrorDetails, is_other_kind: bool) -> tuple[bool, int, bool, bool, bool]:
    """`is_other_kind`: the object has not the type of this branch of a union."""
    is_kind = error["loc"][-1:] == ("type",)  # of another kind of object other fields are missing
    is_value = not error["type"].endswith("_type")
    return error["type"] == "too_long", len(error["loc"]), not is_other_kind, is_kind, is_value


def _is_name(part: int | str) -> bool:
    """Return False for pydantic's names of union branches, such as list[constrained-int] or NamedTool."""
    return isinstance(part, int) or not (part == "str" or part[:1].isupper() or set(part) & set("[-"))


def _unknown(given: pydantic.BaseModel, refuses: bool, within: str = "") -> Iterator[str]:
    """Yield the paths of the unknown fields of an object and of those in it, without indices of lists.

    Args:
        within: path of the object.

    Raises: APIError, naming the first field that is refused
    """
    if given.model_extra:
        kind = type(given) if isinstance(given, OpenObject) else OpenObject
        yield from _not_served(given.model_extra, kind, within, refuses)
    for name, value in given:
        if isinstance(value, pydantic.BaseModel):
            yield from _unknown(value, refuses, f"{within}{name}.")
        elif isinstance(value, list) and value and not isinstance(value[0], int):  # token ids may be many
            for index, item in enumerate(value):
                if isinstance(item, pydantic.BaseModel):
                    yield from _unknown(item, refuses, f"{within}{name}.{index}.")


def _not_served(extra: Mapping[str, Any], kind: type[OpenObject], within: str, refuses: bool) -> Iterator[str]:
    """`_unknown` for the extra fields of the object at `within`."""
    neutral, prefix = kind.unserved(), _INDEX.sub(".", within)
    for name, value in extra.items():
        allowed = neutral.get(name, ())
        if value is None or any(value == other and type(value) is type(other) for other in allowed):
            continue
        if name not in neutral and not refuses:
            yield prefix + name
            continue
        param = (within or name).partition(".")[0]
        if name not in neutral:
            logged = f"{prefix}{name if _PRINTABLE.fullmatch(name) else '...'} is not known"
            raise invalid(f"{within}{name:.80} is not known; leave it out", param, logged)
        hint = "leave it out" if within else kind.hints.get(name, "leave it out")
        problem = f"{within}{name} is not supported with "
        message = f"{problem}the value {value!r:.80}; {hint}"
        raise invalid(message, param, logged=f"{problem}this value")
