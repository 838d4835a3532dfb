"""`--reasoning-parser`, by vLLM's names."""

from typing import NamedTuple

from services.frontend.reasoning.think import THINK, ReasoningStart, ReasoningTags


class ReasoningForm(NamedTuple):
    tags: ReasoningTags
    start: ReasoningStart
    """Start of an answer whose prompt does not determine it."""


GRANITE = ReasoningTags(
    ("Here's my thought process:", "Here is my thought process:"),
    ("Here's my response:", "Here is my response:"),
    " \n",
)
FORMATS: dict[str, ReasoningForm] = {
    "deepseek_r1": ReasoningForm(THINK, ReasoningStart.INSIDE),
    "glm45": ReasoningForm(THINK, ReasoningStart.BY_TAG),
    "granite": ReasoningForm(GRANITE, ReasoningStart.BY_TAG),
    "mistral": ReasoningForm(ReasoningTags(("[THINK]",), ("[/THINK]",)), ReasoningStart.BY_TAG),
    "qwen3": ReasoningForm(THINK, ReasoningStart.BY_TAG),
}


def start_in_prompt(text: str, default: ReasoningStart, tags: ReasoningTags = THINK) -> ReasoningStart:
    """Return where an answer begins whose prompt ends with `text`."""
    end = text.rstrip()
    if end.endswith(tags.opening):
        return ReasoningStart.INSIDE
    return ReasoningStart.OUTSIDE if end.endswith(tags.closing) else default


def start_in_message(message: str, tags: ReasoningTags = THINK) -> ReasoningStart:
    """Return where an answer begins that continues `message`."""
    opened, closed = (max(map(message.rfind, words)) for words in (tags.opening, tags.closing))
    return ReasoningStart.INSIDE if opened > closed else ReasoningStart.OUTSIDE
