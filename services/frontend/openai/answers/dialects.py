"""The JSON of completions and of chat, whole and streamed."""

from typing import Any, Protocol

from services.frontend.openai.answers.chunk import Chunk
from services.frontend.openai.answers.logprobs import chat_json, completion_json


class Dialect(Protocol):
    """The JSON of one HTTP response."""

    prefix: str
    """Prefix of the response's id."""
    object: str
    chunk_object: str
    has_constant_frame: bool
    """True if a chunk that is only text always becomes one event, and such events differ only in the text."""

    def choice(self, index: int, whole: Chunk) -> dict[str, Any]:
        """Return a whole answer."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the choice of a stream's event before any text."""
        ...

    def deltas(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        """Return the choices of a stream's events for a chunk, in order; none while its text is held back."""
        ...


def _token_ids(chunk: Chunk) -> dict[str, Any]:
    return {} if chunk.token_ids is None else {"token_ids": chunk.token_ids}


class CompletionDialect:
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"
    has_constant_frame = True

    def choice(self, index: int, whole: Chunk) -> dict[str, Any]:
        prompt_ids = whole.prompt_token_ids
        return {
            "index": index,
            "text": whole.text,
            "logprobs": completion_json(whole.logprobs) if whole.logprobs else None,
            "finish_reason": whole.finish,
            "stop_reason": whole.stop,
            **_token_ids(whole),
            **({} if prompt_ids is None else {"prompt_token_ids": prompt_ids}),
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def deltas(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        return [self.choice(index, chunk)]


class ChatDialect:
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    has_constant_frame = True

    def __init__(self, role: str = "assistant", beginning: str = "") -> None:
        """
        Args:
            role: the role of the message.
            beginning: the part of the message that the conversation already has, if it is to be shown.
        """
        self._role = role
        self._beginning = beginning

    def choice(self, index: int, whole: Chunk) -> dict[str, Any]:
        message = {"role": self._role, "content": self._beginning + whole.text, "refusal": None}
        ending = {"finish_reason": whole.finish, "stop_reason": whole.stop}
        return {"index": index, "message": message, **self._details(whole), **ending}

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": self._role, "content": self._beginning}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def deltas(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        delta = {"content": chunk.text} if chunk.text else {}
        done = {"stop_reason": chunk.stop} if chunk.finish is not None else {}
        ending = {"finish_reason": chunk.finish, **done}
        return [{"index": index, "delta": delta, **self._details(chunk), **ending}]

    @staticmethod
    def _details(chunk: Chunk) -> dict[str, Any]:
        return {"logprobs": chat_json(chunk.logprobs) if chunk.logprobs else None, **_token_ids(chunk)}
