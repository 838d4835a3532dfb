"""Messages to a prompt, with the checkpoint's own jinja template. A template never comes from a request."""

import datetime
import json
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.checkpoint import CheckpointError
from services.frontend.errors import invalid
from services.frontend.tokenizer import read_json

MAX_RENDERED = 8 * 1024 * 1024
"""Characters a rendered prompt may have."""


def find_template(directory: Path, override: str | None) -> str | None:
    """From `--chat-template`, chat_template.jinja, or tokenizer_config.json. Raises: CheckpointError"""
    if override is not None:
        try:
            return Path(override).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise CheckpointError(f"--chat-template {override} cannot be read: {error}") from None
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = read_json(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


class ChatTemplate:
    """Compiled once. What a template sees is what transformers gives it: messages, special tokens, a few helpers."""

    def __init__(self, text: str | None, special: dict[str, str]) -> None:
        """Raises: CheckpointError, if the text is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().astimezone().strftime(form)
        self._special = special
        try:
            self._template = environment.from_string(text) if text is not None else None
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template is broken: {error}") from None

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Raises: APIError, if there is no template or it refuses these messages."""
        if self._template is None:
            raise invalid(
                "this model has no chat template; use /v1/completions or start with --chat-template"
            )
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(
                messages=messages, add_generation_prompt=True, tools=None, **self._special
            ):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED:
                    raise invalid("the conversation is too long", "messages")
        except jinja2.TemplateError as error:
            raise invalid(f"the chat template refuses these messages: {error}", "messages") from None
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
            raise invalid("the chat template cannot be applied to these messages", "messages") from None
        return "".join(parts)


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
