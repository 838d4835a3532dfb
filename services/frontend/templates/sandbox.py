"""The jinja environment of chat templates: transformers' filters and globals, with limits on time and output."""

import datetime
import json
import math
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED = 8 * 1024 * 1024
"""Maximum characters of a rendered prompt."""
MAX_BASE, MAX_EXPONENT = 10**9, 64
"""Maximum base and exponent of powers."""


class TemplateException(jinja2.TemplateError):
    """The template called `raise_exception`; the message is for the client."""


class TemplateLimit(Exception):
    """The template's output is too large, or rendering takes too long."""


class _Generation(Extension):
    """`{% generation %}` marks the model's messages for training; here only its content matters."""

    tags = {"generation"}  # noqa: RUF012  the form that jinja expects

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """Denies access to unsafe attributes, and checks the time limit at each access and call. Not thread-safe."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.datetime.now().astimezone().strftime(form)
        self._earliest_end = self._end = math.inf
        """Monotonic seconds before which rendering is not ended, and processor seconds at which it is."""

    def render(self, template: jinja2.Template, variables: Mapping[str, Any], seconds: float) -> str:
        """
        Args:
            seconds: limit of processor time: on a busy machine the same template must not be refused.

        Raises: TemplateException, TemplateLimit, and any exception of an expression in the template
        """
        parts: list[str] = []
        size = 0
        self._earliest_end, self._end = time.monotonic() + seconds, time.process_time() + seconds
        for part in template.generate(variables):
            parts.append(part)
            size += len(part)
            if size > MAX_RENDERED:
                raise TemplateLimit(f"more than {MAX_RENDERED} characters")
            self._check_time()
        return "".join(parts)

    def _check_time(self) -> None:
        if time.monotonic() > self._earliest_end and time.process_time() > self._end:  # the first clock is read faster
            raise TemplateLimit("rendering it takes too long")

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._check_time()
        return super().getitem(obj, argument)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Prevent a short expression from making a long text or a huge number."""
        self._check_time()
        if operator == "**":
            if abs(left) > MAX_BASE or abs(right) > MAX_EXPONENT:
                raise TemplateLimit("a power in the template is too large")
        elif not isinstance(left, int | float) or not isinstance(right, int | float):
            size, times = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(size, str | list | tuple) and len(size) * times > MAX_RENDERED:
                raise TemplateLimit(f"more than {MAX_RENDERED} characters")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  as in jinja
        __self._check_time()
        return super().call(__context, __obj, *args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as in transformers, without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateException(message)
