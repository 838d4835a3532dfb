"""The JSON of completions and of chat, whole and streamed."""

from dataclasses import dataclass
from typing import ClassVar

from services.frontend.openai.answers.chunk import Chunk
from services.frontend.openai.answers.logprobs import chat_json, completion_json
from services.frontend.openai.schemas import responses


class CompletionDialect:
    prefix = "cmpl"
    """Prefix of the response's id."""
    chunk_object = "text_completion"
    """Field `object` of a stream's events."""
    has_constant_frame = True
    """True if a chunk that is only text always becomes one event, and such events differ only in the text."""

    def answer(
        self,
        head: responses.AnswerHead,
        whole: list[Chunk],
        usage: responses.Usage,
        prompts: list[responses.PromptLogprobs] | None,
    ) -> responses.CompletionResponse:
        """Return the body of a response that is not streamed.

        Args:
            whole: the choices, one chunk each.
            prompts: log-probabilities of the prompt of each choice, if the body requests them.
        """
        choices = [self.choice(index, chunk) for index, chunk in enumerate(whole)]
        for choice, scored in zip(choices, prompts or (), strict=False):
            choice["prompt_logprobs"] = scored
        return {"object": "text_completion", **head, "choices": choices, "usage": usage}

    @staticmethod
    def counted(usage: responses.Usage) -> responses.Usage:
        """Return the usage of a whole answer, with what is known of its choices."""
        return usage

    def opening(self, index: int) -> None:
        """Return the choice of a stream's event before any text."""

    def deltas(self, index: int, chunk: Chunk) -> list[responses.CompletionChoice]:
        """Return the choices of a stream's events for a chunk, in order; none while its text is held back."""
        return [self.choice(index, chunk)]

    @staticmethod
    def choice(index: int, chunk: Chunk) -> responses.CompletionChoice:
        choice: responses.CompletionChoice = {
            "index": index,
            "text": chunk.text,
            "logprobs": completion_json(chunk.logprobs) if chunk.logprobs else None,
            "finish_reason": chunk.finish,
            "stop_reason": chunk.stop,
        }
        if chunk.token_ids is not None:
            choice["token_ids"] = chunk.token_ids
        if chunk.prompt_token_ids is not None:
            choice["prompt_token_ids"] = chunk.prompt_token_ids
        return choice


@dataclass
class ChatDialect:
    prefix, chunk_object = "chatcmpl", "chat.completion.chunk"
    has_constant_frame = True
    no_content: ClassVar[str | None] = ""
    """Content before any text."""

    role: str = "assistant"
    """Role of the message."""
    beginning: str = ""
    """The part of the message that the conversation already has, if it is to be shown."""

    def answer(
        self,
        head: responses.AnswerHead,
        whole: list[Chunk],
        usage: responses.Usage,
        prompts: list[responses.PromptLogprobs] | None,
    ) -> responses.ChatResponse:
        choices = [self.choice(index, chunk) for index, chunk in enumerate(whole)]
        answer: responses.ChatResponse = {
            "id": head["id"],
            "object": "chat.completion",
            "created": head["created"],
            "model": head["model"],
            "choices": choices,
            "usage": self.counted(usage),
        }
        if whole[0].prompt_token_ids is not None:
            answer["prompt_token_ids"] = whole[0].prompt_token_ids
        if prompts is not None:
            answer["prompt_logprobs"] = prompts[0]
        return answer

    def counted(self, usage: responses.Usage) -> responses.Usage:
        return usage

    def choice(self, index: int, whole: Chunk) -> responses.ChatChoice:
        message: responses.ChatMessage = {"role": self.role, "content": self.beginning + whole.text, "refusal": None}
        choice: responses.ChatChoice = {
            "index": index,
            "message": message,
            "logprobs": chat_json(whole.logprobs) if whole.logprobs else None,
            "finish_reason": whole.finish,
            "stop_reason": whole.stop,
        }
        if whole.token_ids is not None:
            choice["token_ids"] = whole.token_ids
        return choice

    def opening(self, index: int) -> responses.ChatDelta:
        delta: responses.MessageDelta = {"role": self.role, "content": self.beginning or self.no_content}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def deltas(self, index: int, chunk: Chunk) -> list[responses.ChatDelta]:
        return [self._delta(index, chunk, {"content": chunk.text} if chunk.text else {})]

    def _delta(self, index: int, chunk: Chunk, delta: responses.MessageDelta) -> responses.ChatDelta:
        choice: responses.ChatDelta = {
            "index": index,
            "delta": delta,
            "logprobs": chat_json(chunk.logprobs) if chunk.logprobs else None,
            "finish_reason": chunk.finish,
        }
        if chunk.token_ids is not None:
            choice["token_ids"] = chunk.token_ids
        if chunk.finish is not None:
            choice["stop_reason"] = chunk.stop
        return choice


Dialect = CompletionDialect | ChatDialect
"""The JSON of one HTTP response."""
