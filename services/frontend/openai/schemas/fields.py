"""Types and bounds of the fields of request bodies."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticKnownError

from protocol.sampling import MAX_BIAS, MAX_BIASED, MAX_LOGPROBS, MAX_PENALTY
from services.frontend.tools.schema import MAX_NAME, NAME_PATTERN

MAX_TEMPERATURE = 2.0
"""OpenAI's bound."""
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 128
MAX_BAD_WORD_TEXTS = 128
MAX_TOOLS = 128
"""Tools of a body; OpenAI's bound. An assistant message has no more calls."""
MAX_PARTS = 1024
"""Parts of a message's content."""
MAX_PROMPTS = 64
MAX_TEXT = 4_000_000
"""Characters."""
MAX_URL = 1 << 26
"""Characters of a data URL."""
MAX_PROMPT_IDS = 2_000_000
MAX_MESSAGES = 4096
MAX_CHOICES = 128
"""Maximum of `n`, the answers per prompt; OpenAI's bound."""
MAX_ANSWERS = 1024
"""Answers to all prompts of a body. They are submitted without a pause."""
MAX_SCHEMA_CHARS = 262_144
MAX_ALLOWED_IDS = 262_144
MAX_INPUTS = 2048
"""Inputs of one embedding request; OpenAI's bound."""

# `fail_fast`: a list is checked up to its first wrong item, as a million errors would block the event loop.
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_PROMPT_IDS, fail_fast=True)]
Stop = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY, allow_inf_nan=False)]
ToolName = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
"""Name of a tool that the body declares."""
GivenName = Annotated[str, Field(max_length=MAX_NAME)]
"""Name of a tool in a call, or in `tool_choice`."""
TemplateVariables = Annotated[dict[str, Any], Field(max_length=32)]
Bias = Annotated[float, Field(json_schema_extra={"minimum": -MAX_BIAS, "maximum": MAX_BIAS})]
"""`parameters.sampling` checks the range, so that the error names the token."""


def _bounded(given: object) -> object:
    """Count the items of a mapping before pydantic checks each of them."""
    if isinstance(given, dict) and len(given) > MAX_BIASED:
        context = {"field_type": "Dictionary", "max_length": MAX_BIASED, "actual_length": len(given)}
        raise PydanticKnownError("too_long", context)
    return given


JSON = dict[str, Any]
"""The size is bounded by the body's, the depth when a schema is compiled."""
Biases = Annotated[dict[str, Bias], Field(max_length=MAX_BIASED), BeforeValidator(_bounded)]
