"""Messages to a prompt, with the checkpoint's own jinja template. A template never comes from a request."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from services.checkpoint import CheckpointError
from services.frontend import template_trial
from services.frontend.errors import invalid
from services.frontend.template_sandbox import Refusal, Sandbox, TemplateLimit
from services.frontend.tokenizer import read_json

RENDER_SECONDS = 1.0
"""Most time for the messages of one request."""
TRIAL_PATIENCE = 60.0
"""Seconds until a trial that neither ends nor is ended by its own limits counts as failed."""


def find_template(directory: Path, override: str | None) -> str | None:
    """From `--chat-template`, chat_template.jinja, or tokenizer_config.json. Raises: CheckpointError"""
    file = Path(override) if override is not None else directory / "chat_template.jinja"
    if override is not None or file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            flag = f"--chat-template {override}" if override is not None else str(file)
            raise CheckpointError(f"{flag} cannot be read: {error}") from None
    template = read_json(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def try_out(text: str, special: dict[str, str]) -> None:
    """Renders a template in a process that can be ended.

    Raises: CheckpointError, when the template is broken or would not end.
    """
    command = [sys.executable, "-P", "-m", template_trial.__name__]
    job = msgspec.json.encode({"template": text, "special": special})
    try:
        trial = subprocess.run(
            command, input=job, stdout=subprocess.PIPE, timeout=TRIAL_PATIENCE, check=False
        )
        ended, output = trial.returncode == 0, trial.stdout
    except subprocess.TimeoutExpired:
        ended, output = False, b""
    if not ended:
        what = output.decode(errors="replace").strip() or (
            f"it took more than {template_trial.SECONDS} s or {template_trial.MEGABYTES} MB "
            "for a short conversation"
        )
        raise CheckpointError(f"the chat template is broken: {what}; give another with --chat-template")


class ChatTemplate:
    """Compiled once. What a template sees is what transformers gives it: messages, special tokens, a few helpers."""

    def __init__(self, text: str | None, special: dict[str, str]) -> None:
        """Raises: CheckpointError, if the text is no template."""
        self._special = special
        self._sandbox = Sandbox()
        try:
            self._template = self._sandbox.from_string(text) if text is not None else None
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(f"the chat template is broken: {error}") from None

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Raises: APIError, if there is no template or it refuses these messages."""
        if self._template is None:
            raise invalid(
                "this model has no chat template; use /v1/completions or start with --chat-template"
            )
        try:
            return self._sandbox.render(self._template, messages, self._special, RENDER_SECONDS)
        except Refusal as error:
            raise invalid(f"the chat template refuses these messages: {error}", "messages") from None
        except TemplateLimit as error:
            raise invalid(f"the conversation is too long: {error}", "messages") from None
        except Exception:  # templates index, add and divide whatever the messages hold
            raise invalid("the chat template cannot be applied to these messages", "messages") from None
