"""How completions and chat answers look on the wire."""

from typing import Any, Protocol


class Dialect(Protocol):
    prefix: str
    """Of answer ids."""
    object: str
    chunk_object: str

    def choice(self, index: int, text: str, finish: str | None, stop: int | str | None) -> dict[str, Any]:
        """A whole answer."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says before any text."""
        ...

    def delta(self, index: int, text: str, finish: str | None, stop: int | str | None) -> dict[str, Any]:
        """A piece of a stream; `finish` and `stop` are None but in the last."""
        ...


class CompletionDialect:
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, text: str, finish: str | None, stop: int | str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": stop}

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    delta = choice


class ChatDialect:
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, finish: str | None, stop: int | str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        ending = {"logprobs": None, "finish_reason": finish, "stop_reason": stop}
        return {"index": index, "message": message, **ending}

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, text: str, finish: str | None, stop: int | str | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        done = {"stop_reason": stop} if finish is not None else {}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, **done}
