"""Fields of a body that are not served: known ones are refused by name, unknown ones are ignored with a notice."""

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel

from services.frontend.errors import invalid
from services.frontend.openai.schemas.open_object import OpenObject
from services.frontend.openai.schemas.unserved import HINTS, Neutral

log = logging.getLogger("runahead.frontend")

UnknownFieldMode = Literal["warn", "refuse", "ignore"]
MAX_NAMED = 16
"""Names in the header and in a log line."""
MAX_LOGGED = 1024
"""Distinct combinations of names that are logged, once each."""
_INDEX = re.compile(r"\.\d+\.")
_PRINTABLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ExtraFields:
    """The rule for fields that a body's model does not have."""

    def __init__(self, mode: UnknownFieldMode) -> None:
        self._mode = mode
        self._logged: set[tuple[str, ...]] = set()

    def check(self, body: OpenObject, request_id: str) -> list[str]:
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


def _unknown(given: BaseModel, refuses: bool, within: str = "") -> Iterator[str]:
    """Yield the paths of the unknown fields of an object and of those in it, without indices of lists.

    Args:
        within: path of the object.

    Raises: APIError, naming the first field that is refused
    """
    if given.model_extra:
        neutral = given.unserved() if isinstance(given, OpenObject) else {}
        yield from _not_served(given.model_extra, neutral, within, refuses)
    for name, value in given:
        if isinstance(value, BaseModel):
            yield from _unknown(value, refuses, f"{within}{name}.")
        elif isinstance(value, list) and value and not isinstance(value[0], int):  # token ids may be many
            for index, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from _unknown(item, refuses, f"{within}{name}.{index}.")


def _not_served(extra: Mapping[str, Any], neutral: Neutral, within: str, refuses: bool) -> Iterator[str]:
    """`_unknown` for the extra fields of the object at `within`."""
    prefix = _INDEX.sub(".", within)
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
        hint = "leave it out" if within else HINTS.get(name, "leave it out")
        problem = f"{within}{name} is not supported with "
        message = f"{problem}the value {value!r:.80}; {hint}"
        raise invalid(message, param, logged=f"{problem}this value")
