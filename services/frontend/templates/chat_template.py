"""Chat messages to a prompt, with the checkpoint's jinja template. A template never comes from a request."""

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from msgspec.structs import replace

from services.checkpoint import CheckpointError, read_json, read_text
from services.frontend.errors import APIError, invalid
from services.frontend.templates import call_form
from services.frontend.templates.jobs import Conversation, LimitReached, Rendered, TemplateRefused, TemplateSources
from services.frontend.templates.renderer import Renderer, broken

TRIAL_SECONDS = 2.0
"""Limit of processor time to render each of the conversations that a template is tried with."""
MAX_VALUES, MAX_VALUE_DEPTH, MAX_VALUE_CHARS = 1024, 8, 65_536
"""Limits of one of the `chat_template_kwargs`."""
MAX_NUMBER = 2**31
_RESERVED = frozenset(
    {
        "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
        "tokenize", "conversation", "tokenizer_kwargs", "return_dict", "return_tensors", "padding", "truncation",
        "max_length", "return_assistant_tokens_mask", "raise_exception", "strftime_now",
    }
)  # fmt: skip
_FILES = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}
_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_DEVELOPER = re.compile(r"""["']developer["']""")
_PROBE, _SECOND, _KEY = "probe-of-a-content", "second-probe", "key-of-a-part"
_MARKER = f"END-OF-FINAL-MESSAGE-{secrets.token_hex(16)} "
"""A text that no message contains. Its last character shows whether a template strips messages."""
_USER, _ASSISTANT = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}
_CALL = {"id": "call-1", "type": "function", "function": {"name": _PROBE, "arguments": {"zone": "UTC"}}}
_TOOL = {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}
_PARTS = [{"type": "text", "text": text, _KEY: ""} for text in (_PROBE, _SECOND)]
"""Content of a message. A template that shows the key writes the list as it is in Python or JSON."""
_TRIALS: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]] | None], ...] = (
    ([_USER], None),
    ([{"role": "system", "content": "Be brief."}, _USER, _ASSISTANT, _USER], None),
    (
        [
            _USER,
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": "noon", "tool_call_id": "call-1", "name": "now"},
        ],
        [{"type": "function", "function": _TOOL}],
    ),
)
"""Conversations and tools."""


def find_template(checkpoint: Path, override: str | None, kind: str = "default") -> str | None:
    """Return the template of `--chat-template`, of a file of its own, or of tokenizer_config.json, in this order.

    Args:
        kind: "tool_use": the checkpoint's separate template for tools, if it has one, which transformers uses if tools
            are given. That of `--chat-template` replaces both.

    Raises: CheckpointError
    """
    if override is not None:
        if kind != "default":
            return None
        try:
            return Path(os.path.expanduser(override)).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"--chat-template {override} cannot be read: {error}") from None
    if (text := read_text(checkpoint, _FILES[kind])) is not None:
        return text
    template = read_json(checkpoint, "tokenizer_config.json").get("chat_template")
    named: dict[Any, Any] = {"default": template}
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    found = named.get(kind)
    return found if isinstance(found, str) else None


class ChatTemplate:
    """The template of a model. Its variables are the same as in transformers: messages, tools, special tokens, helpers.

    It is compiled and rendered in another process; see `render_process`.
    """

    def __init__(
        self,
        text: str | None,
        special: dict[str, str],
        tool_use: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            tool_use: used in place of `text` if tools are given.
            variables: those of conversations that do not set them.

        Raises: CheckpointError, if one is not a template, or a variable cannot be set
        """
        self._defaults = variables or {}
        try:
            _check_variables(self._defaults, special)
        except APIError as error:
            raise CheckpointError(f"--default-chat-template-kwargs: {error}") from None
        self.text = text
        self._special = special
        self._has_default, self._has_tool_use = text is not None, tool_use is not None
        self._renderer: Renderer | None = None
        if self._has_default or self._has_tool_use:
            self._renderer = Renderer(TemplateSources(text, tool_use, special))
        self._reaches_limit = False
        """A prompt reached a limit, so no more are tried; `try_out` says why."""
        plain, parts = ({"role": "user", "content": content} for content in (_PROBE, _as_parts(_PROBE)))
        self._needs_parts = not self._shown([plain]) and bool(self._shown([parts]))
        """The template shows a content only if it is a list of parts, as those of some models that read images."""
        called, tools = _TRIALS[-1]
        self._part_roles, self._part_roles_with_tools = (
            {role for role in ("system", "developer", "user", "assistant") if self._shows_parts(role, given)}
            for given in (None, tools)
        )
        """Roles of messages whose texts the template shows one by one."""
        shown = {form: self._shown(form.of(called), tools) for form in call_form.FORMS}
        self._call_form = min(filter(shown.get, shown), key=lambda form: len(shown[form]), default=call_form.FORMS[0])
        """One in which the template shows calls, and nothing beside them."""
        self._knows_developer = _DEVELOPER.search(f"{text}{tool_use}") is not None

    def try_out(self) -> None:
        """Render short conversations, which the template may refuse. Raises: CheckpointError, if it reaches a limit"""
        for messages, tools in _TRIALS:
            job = Conversation(self._call_form.of(messages), tools, seconds=TRIAL_SECONDS)
            if self._renderer and isinstance(outcome := self._renderer.render(job), LimitReached):
                raise broken(f"with a short conversation, {outcome.reason}")

    def _shown(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """Return the prompt of these messages, "" if it does not have their probe."""
        if self._renderer is None or self._reaches_limit:
            return ""
        outcome = self._renderer.render(Conversation(messages, tools))
        self._reaches_limit = isinstance(outcome, LimitReached)
        return outcome.text if isinstance(outcome, Rendered) and _PROBE in outcome.text else ""

    def _shows_parts(self, role: str, tools: list[dict[str, Any]] | None) -> bool:
        talk = [_USER, _ASSISTANT] * 2 if role in ("user", "assistant") else [{"role": role}, _USER]
        messages = [
            self._formed({**said, "content": _PARTS} if said["role"] == role else said, {role}) for said in talk
        ]
        text, shown = self._shown(messages, tools), sum(said["role"] == role for said in talk)
        return min(text.count(_PROBE), text.count(_SECOND)) >= shown and _KEY not in text

    def _formed(self, message: dict[str, Any], part_roles: set[str]) -> dict[str, Any]:
        """Return the message with its content in the form that the template expects."""
        content = message.get("content")
        if isinstance(content, list) and message["role"] not in part_roles and {p["type"] for p in content} == {"text"}:
            content = "\n".join(part["text"] for part in content)
        if isinstance(content, str) and self._needs_parts:
            content = _as_parts(content)
        return {**message, "content": content}

    def render(self, given: Conversation) -> str:
        """Return the prompt. Raises: APIError, if there is no template, or it refuses this conversation"""
        has_template = self._has_default or (self._has_tool_use and given.tools is not None)
        if self._renderer is None or not has_template:
            raise invalid("this model has no chat template; use /v1/completions or start with --chat-template")
        messages = given.messages if self._knows_developer else _without_developer(given.messages)
        part_roles = self._part_roles if given.tools is None else self._part_roles_with_tools
        messages = [self._formed(message, part_roles) for message in self._call_form.of(messages)]
        messages = _with_marker(messages) if given.continue_final_message else messages
        _check_variables(given.variables, self._special)
        variables = {**self._defaults, **given.variables}
        match self._renderer.render(replace(given, messages=messages, variables=variables)):
            case Rendered(text):
                return _cut(text) if given.continue_final_message else text
            case TemplateRefused(reason):
                refused = "the chat template refuses these messages"
                raise invalid(f"{refused}: {reason}", "messages", logged=refused)  # the reason may quote them
            case LimitReached(reason):
                raise invalid(f"the conversation is too long: {reason}", "messages")
        raise invalid("the chat template cannot be applied to these messages", "messages")


def _without_developer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages; those of the system and of a developer become one of the system, the first, by vLLM's rule.
    Templates that do not know the role omit or refuse its messages, and many refuse a second one of the system."""
    if all(message["role"] != "developer" for message in messages):
        return messages
    rules, others = (
        [message for message in messages if (message["role"] in ("system", "developer")) is is_rule]
        for is_rule in (True, False)
    )
    if len(rules) == 1:
        return [{**rules[0], "role": "system"}, *others]
    texts = [
        text if isinstance(text := rule["content"] or "", str) else "\n".join(part.get("text", "") for part in text)
        for rule in rules
    ]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def _as_parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


def _check_variables(given: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Raises: APIError"""
    for name, value in given.items():
        if name in _RESERVED or name in special or name in jinja2.defaults.DEFAULT_NAMESPACE:
            raise invalid(f"chat_template_kwargs may not set {name:.80}", "chat_template_kwargs")
        if _VARIABLE.fullmatch(name) is None:
            message = f"chat_template_kwargs: {name!r:.80} is not a name"
            raise invalid(message, "chat_template_kwargs", logged="chat_template_kwargs: a key is not a name")
        if not _is_small(value):
            message = f"chat_template_kwargs.{name} is too large"
            raise invalid(message, "chat_template_kwargs", logged="chat_template_kwargs: a value is too large")


def _is_small(value: Any) -> bool:
    """Check a JSON value: at most MAX_VALUES values, MAX_VALUE_DEPTH levels and MAX_VALUE_CHARS characters in all."""
    level, values, chars = [value], 0, 0
    for _ in range(MAX_VALUE_DEPTH):
        values += len(level)
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str):
                chars += len(item)
            elif isinstance(item, int | float) and abs(item) > MAX_NUMBER:
                return False
            elif isinstance(item, dict):
                inner += [*item, *item.values()]
            elif isinstance(item, list):
                inner += item
        if values > MAX_VALUES or chars > MAX_VALUE_CHARS:
            return False
        if not inner:
            return True
        level = inner
    return False


def _with_marker(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with a marker at the end of the last one. Raises: APIError"""
    *others, last = messages
    content = last["content"]
    *before, end = content if isinstance(content, list) else _as_parts(content or "")
    if not any(part["text"] for part in (*before, end)):
        raise invalid("messages: the last message has no content to continue", "messages")
    text = end["text"] + _MARKER
    return [*others, {**last, "content": [*before, {**end, "text": text}] if isinstance(content, list) else text}]


def _cut(text: str) -> str:
    """Return the text before the marker, and without the white space before it if the template strips messages.

    Raises: APIError
    """
    at = text.rfind(_MARKER.strip())
    if at < 0:
        raise invalid("continue_final_message: the chat template does not show the last message", "messages")
    return text[:at] if text[at:].startswith(_MARKER) else text[:at].rstrip()
