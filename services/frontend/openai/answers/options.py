"""Fields of a body that shape its answers."""

from dataclasses import dataclass

from services.frontend.openai.parameters.structured import constraint_field
from services.frontend.openai.schemas.requests import ChatRequest, CompletionRequest


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    stops: list[str]
    num_samples: int = 1
    """Choices per prompt."""
    constraint: str | None = None
    """The body's field that constrains the output, for error messages."""
    echo: bool = False
    generates: bool = True
    """False if only the prompt is wanted."""
    token_ids: bool = False
    include_stop: bool = False
    show_special: bool = False

    @classmethod
    def from_body(cls, body: CompletionRequest | ChatRequest) -> "AnswerOptions":
        is_completion = isinstance(body, CompletionRequest)
        return cls(
            stops=body.stops(),
            num_samples=body.n or 1,
            constraint=constraint_field(body),
            echo=is_completion and bool(body.echo),
            generates=not is_completion or body.max_tokens != 0,
            token_ids=bool(body.return_token_ids),
            include_stop=bool(body.include_stop_str_in_output),
            show_special=body.skip_special_tokens is False,
        )
