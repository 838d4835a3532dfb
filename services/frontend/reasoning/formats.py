"""`--reasoning-parser`, by vLLM's names: where an answer begins when its prompt does not tell."""

from services.frontend.reasoning.think import CLOSING, OPENING, Begins

FORMATS: dict[str, Begins] = {"deepseek_r1": Begins.INSIDE, "qwen3": Begins.PERHAPS}


def begins(text_before: str, otherwise: Begins) -> Begins:
    """Where an answer begins whose prompt ends with this text."""
    end = text_before.rstrip()
    if end.endswith(OPENING):
        return Begins.INSIDE
    return Begins.OUTSIDE if end.endswith(CLOSING) else otherwise


def continues(message: str) -> Begins:
    """Where an answer begins that goes on with this message."""
    return Begins.INSIDE if message.rfind(OPENING) > message.rfind(CLOSING) else Begins.OUTSIDE
