"""The jinja environment of chat templates: transformers' filters and globals, with limits on time and output."""

import datetime
import json
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


class _TimeIsOver(BaseException):
    """Not an Exception: jinja catches those in some expressions and goes on, or raises another one in their place."""


class _Generation(Extension):
    """`{% generation %}` marks the model's messages for training; here only its content matters."""

    tags = {"generation"}  # noqa: RUF012  the form that jinja expects

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """Denies access to unsafe attributes, and limits time and output. For the main thread of a process."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.datetime.now().astimezone().strftime(form)

    def render(self, template: jinja2.Template, variables: Mapping[str, Any], seconds: float) -> str:
        """
        Args:
            seconds: limit of processor time: on a busy machine the same template must not be refused.

        Raises: TemplateException, TemplateLimit, and any exception of an expression in the template
        """
        parts: list[str] = []
        size = 0
        with _time_limit(seconds):
            for part in template.generate(variables):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED:
                    raise TemplateLimit(f"more than {MAX_RENDERED} characters")
        return "".join(parts)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Prevent a short expression from making a long text or a huge number."""
        if operator == "**":
            if abs(left) > MAX_BASE or abs(right) > MAX_EXPONENT:
                raise TemplateLimit("a power in the template is too large")
        elif not isinstance(left, int | float) or not isinstance(right, int | float):
            size, times = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(size, str | list | tuple) and len(size) * times > MAX_RENDERED:
                raise TemplateLimit(f"more than {MAX_RENDERED} characters")
        return super().call_binop(context, operator, left, right)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Interrupt what takes more processor time, between two operations of Python. Raises: TemplateLimit"""

    def interrupt(*_: object) -> NoReturn:
        raise _TimeIsOver

    signal.signal(signal.SIGPROF, interrupt)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _TimeIsOver:
        raise TemplateLimit("rendering it takes too long") from None


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
