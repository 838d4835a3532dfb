"""How completions and chat answers look on the wire."""

from typing import Any


class CompletionDialect:
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, text: str, finish: str | None, stop: int | str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": stop}

    def first(self, index: int) -> dict[str, Any] | None:
        return None

    delta = choice


class ChatDialect:
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, finish: str | None, stop: int | str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": finish,
            "stop_reason": stop,
        }

    def first(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, text: str, finish: str | None, stop: int | str | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        done = {"stop_reason": stop} if finish is not None else {}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, **done}
