"""`--reasoning-parser`, by vLLM's names: where an answer begins if its prompt does not determine it."""

from services.frontend.reasoning.think import CLOSING, OPENING, ReasoningStart

FORMATS: dict[str, ReasoningStart] = {
    "deepseek_r1": ReasoningStart.INSIDE,
    "qwen3": ReasoningStart.BY_TAG,
}


def start_in_prompt(text: str, default: ReasoningStart) -> ReasoningStart:
    """Return where an answer begins whose prompt ends with `text`."""
    end = text.rstrip()
    if end.endswith(OPENING):
        return ReasoningStart.INSIDE
    return ReasoningStart.OUTSIDE if end.endswith(CLOSING) else default


def start_in_message(message: str) -> ReasoningStart:
    """Return where an answer begins that continues `message`."""
    return (
        ReasoningStart.INSIDE if message.rfind(OPENING) > message.rfind(CLOSING) else ReasoningStart.OUTSIDE
    )
