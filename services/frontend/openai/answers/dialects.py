"""How completions and chat answers look on the wire."""

from typing import Any, Protocol

from services.frontend.openai.answers.chunk import Piece
from services.frontend.openai.answers.logprobs import chat_json, completion_json


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


def _token_ids(piece: Piece) -> dict[str, Any]:
    return {} if piece.token_ids is None else {"token_ids": piece.token_ids}


class CompletionDialect:
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"
    text_is_plain = True

    def choice(self, index: int, whole: Piece) -> dict[str, Any]:
        asked = whole.prompt_token_ids
        return {
            "index": index,
            "text": whole.text,
            "logprobs": completion_json(whole.logprobs) if whole.logprobs else None,
            "finish_reason": whole.finish,
            "stop_reason": whole.stop,
            **_token_ids(whole),
            **({} if asked is None else {"prompt_token_ids": asked}),
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def deltas(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        return [self.choice(index, piece)]


class ChatDialect:
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    text_is_plain = True

    def __init__(self, role: str = "assistant", beginning: str = "") -> None:
        """Whose message it is, and the beginning of it that the conversation had already, where it is to be shown."""
        self._role = role
        self._beginning = beginning

    def choice(self, index: int, whole: Piece) -> dict[str, Any]:
        message = {"role": self._role, "content": self._beginning + whole.text, "refusal": None}
        ending = {"finish_reason": whole.finish, "stop_reason": whole.stop}
        return {"index": index, "message": message, **self._details(whole), **ending}

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": self._role, "content": self._beginning}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def deltas(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        delta = {"content": piece.text} if piece.text else {}
        done = {"stop_reason": piece.stop} if piece.finish is not None else {}
        ending = {"finish_reason": piece.finish, **done}
        return [{"index": index, "delta": delta, **self._details(piece), **ending}]

    @staticmethod
    def _details(piece: Piece) -> dict[str, Any]:
        return {"logprobs": chat_json(piece.logprobs) if piece.logprobs else None, **_token_ids(piece)}
