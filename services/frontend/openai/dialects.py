"""How completions and chat answers look on the wire."""

from typing import Any, Protocol

from services.frontend.openai.piece import Piece


class Dialect(Protocol):
    """Of one HTTP request."""

    prefix: str
    """Of answer ids."""
    object: str
    chunk_object: str
    text_is_plain: bool
    """Whether a piece of text alone always becomes one event that differs from others in that text only."""

    def choice(self, index: int, whole: Piece) -> dict[str, Any]:
        """A whole answer."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says before any text."""
        ...

    def deltas(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """What a stream says of a piece, in order; nothing while it must be held back."""
        ...


class CompletionDialect:
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"
    text_is_plain = True

    def choice(self, index: int, whole: Piece) -> dict[str, Any]:
        return {
            "index": index,
            "text": whole.text,
            "logprobs": None,
            "finish_reason": whole.finish,
            "stop_reason": whole.stop,
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def deltas(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        return [self.choice(index, piece)]


class ChatDialect:
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    text_is_plain = True

    def choice(self, index: int, whole: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": whole.text, "refusal": None}
        ending = {"logprobs": None, "finish_reason": whole.finish, "stop_reason": whole.stop}
        return {"index": index, "message": message, **ending}

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def deltas(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        delta = {"content": piece.text} if piece.text else {}
        done = {"stop_reason": piece.stop} if piece.finish is not None else {}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": piece.finish, **done}]
