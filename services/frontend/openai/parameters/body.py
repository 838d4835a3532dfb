"""Request bodies: from bytes to checked fields."""

import asyncio
from typing import Any, TypeVar

import msgspec
import pydantic
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest

from services.frontend.errors import GONE, APIError, invalid
from services.frontend.openai.parameters.extra_fields import ExtraFields
from services.frontend.openai.schemas.open_object import OpenObject
from services.frontend.openai.schemas.requests import BaseGenerationRequest

BODY_SECONDS = 30.0
"""Time limit for a client to send its body."""
MAX_ERRORS = 1000
"""Wrong values of a body that are described; more are only counted, as each description takes microseconds."""

B = TypeVar("B", bound=OpenObject)
C = TypeVar("C", bound=OpenObject)


class BodyParser(ExtraFields):
    """Reads and checks bodies. Names of ignored fields are stored as `state.ignored_parameters` of the request."""

    async def parse(self, http: HTTPRequest, kind: type[B]) -> B:
        """Raises: APIError, naming the field that is wrong"""
        return self._checked(http, decoded(await _read(http)), kind)

    async def parse_prompt(self, http: HTTPRequest, chat: type[B], other: type[C]) -> B | C:
        """Parse a conversation, which has `messages`, or another prompt. Raises: APIError, as `parse`"""
        content = decoded(await _read(http))
        return self._checked(http, content, chat) if "messages" in content else self._checked(http, content, other)

    def _checked(self, http: HTTPRequest, content: dict[str, Any], kind: type[B]) -> B:
        """Raises: APIError, naming the field that is wrong"""
        body = validated(content, kind)
        http.state.ignored_parameters = self.check(body, http.state.request_id)
        return body


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


async def _read(http: HTTPRequest) -> bytes:
    if (encoding := http.headers.get("content-encoding", "identity")) != "identity":
        raise APIError(415, f"a body with Content-Encoding {encoding!r:.99} is not read; send it uncompressed")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await http.body()
    except TimeoutError:
        raise APIError(408, "the request body did not arrive in time") from None
    except ClientDisconnect:
        raise APIError(GONE, "the client closed the connection") from None


def _json(raw: bytes) -> Any:
    """Decode strict JSON: UTF-8 without lone surrogates, no NaN, no numbers beyond float64. Raises: APIError"""
    try:
        return msgspec.json.decode(raw)
    except RecursionError:
        raise invalid("the request body is nested too deeply") from None
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
    "union_tag_invalid": "{tag!r:.100} is not supported here, only {expected_tags}",
}
"""Pydantic's type of an error -> message, where pydantic's own speaks of its validation."""


def _named(error: pydantic.ValidationError) -> APIError:
    """Return the most specific of the errors in the first bad field: that of a list's length, else the one at the
    deepest location, and among equals one of a value, as another type may be allowed."""
    if error.error_count() > MAX_ERRORS:
        return invalid(f"the request body has {error.error_count()} wrong values")
    errors = error.errors(include_url=False, include_input=False)
    field = str(errors[0]["loc"][0]) if errors[0]["loc"] else ""
    deepest = max((e for e in errors if not field or str(e["loc"][0]) == field), key=_specificity)
    where = ".".join(str(part) for part in (field, *deepest["loc"][1:]) if _is_name(part))
    plain = _PLAIN.get(deepest["type"])
    text = plain.format_map(deepest.get("ctx", {})) if plain else deepest["msg"]
    message = f"{where}: {text}" if where else text
    return invalid(message, field or None, logged=f"{field or 'the request body'}: {deepest['type']}")


def _specificity(error: ErrorDetails) -> tuple[bool, int, bool]:
    return error["type"] == "too_long", len(error["loc"]), not error["type"].endswith("_type")


def _is_name(part: int | str) -> bool:
    """Return False for pydantic's names of union branches, such as list[constrained-int] or NamedTool."""
    return isinstance(part, int) or not (part == "str" or part[:1].isupper() or set(part) & set("[-"))
