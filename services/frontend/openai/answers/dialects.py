"""The JSON of completions and of chat, whole and streamed."""

from dataclasses import dataclass, field
from typing import Any

from services.frontend.openai.answers.chat_output import AnswerParser, ChatOutput
from services.frontend.openai.answers.chunk import Chunk
from services.frontend.openai.answers.logprobs import chat_json, completion_json
from services.frontend.openai.answers.usage import ReasoningCounter
from services.frontend.openai.schemas import responses
from services.frontend.parsing.events import Arguments, CallStart, Content, ParsedEvent, Reasoning
from services.frontend.tools.json_calls import NamedParser


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
    """Chat answers, whose text is split into reasoning, tool calls and content."""

    prefix, chunk_object = "chatcmpl", "chat.completion.chunk"

    output: ChatOutput
    reasoning: ReasoningCounter
    role: str = "assistant"
    """Role of the message."""
    beginning: str = ""
    """The part of the message that the conversation already has, if it is to be shown."""
    _parsers: dict[int, AnswerParser] = field(default_factory=dict)
    """By choice, of a stream."""

    @property
    def has_constant_frame(self) -> bool:
        return self.output.tools.parser is None and self.output.start is None  # all text is content

    @property
    def _shows_reasoning(self) -> bool:
        return self.output.body.include_reasoning is not False

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
        if self.output.start is not None or self.reasoning.num_tokens:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning.num_tokens}
        return usage

    def choice(self, index: int, whole: Chunk) -> responses.ChatChoice:
        parser = AnswerParser(self.output, eager=False)
        delta = self._parsed(index, parser.push(whole.text, is_last=True))
        self.reasoning.end(index)
        content, reasons = self.beginning + (delta.get("content") or ""), self.output.start is not None
        message: responses.ChatMessage = {"role": self.role, "content": content, "refusal": None}
        if calls := delta.get("tool_calls"):
            found: list[Any] = [{"id": c["id"], "type": c["type"], "function": c["function"]} for c in calls]
            message["tool_calls"] = found
        if self._shows_reasoning and (reasons or "reasoning" in delta):
            message["reasoning_content"] = message["reasoning"] = delta.get("reasoning")
        if not content and (calls or reasons):
            message["content"] = None
        choice: responses.ChatChoice = {
            "index": index,
            "message": message,
            "logprobs": chat_json(whole.logprobs) if whole.logprobs else None,
            "finish_reason": self._finish(whole, parser),
            "stop_reason": whole.stop,
        }
        if whole.token_ids is not None:
            choice["token_ids"] = whole.token_ids
        return choice

    def opening(self, index: int) -> responses.ChatDelta:
        no_content = "" if self.has_constant_frame else None  # other answers may have none
        delta: responses.MessageDelta = {"role": self.role, "content": self.beginning or no_content}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def deltas(self, index: int, chunk: Chunk) -> list[responses.ChatDelta]:
        if self.has_constant_frame:
            has_content = chunk.text or chunk.finish is None  # a token without text is an event, too
            return [self._delta(index, chunk, {"content": chunk.text} if has_content else {}, chunk.finish)]
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = AnswerParser(self.output, eager=True)
        delta = self._parsed(index, parser.push(chunk.text, is_last=chunk.finish is not None))
        if chunk.finish is not None:
            self.reasoning.end(index)
        if not delta and chunk.is_text_only:
            return []
        return [self._delta(index, chunk, delta, self._finish(chunk, parser))]

    def _delta(
        self, index: int, chunk: Chunk, delta: responses.MessageDelta, finish: responses.FinishName | None
    ) -> responses.ChatDelta:
        choice: responses.ChatDelta = {
            "index": index,
            "delta": delta,
            "logprobs": chat_json(chunk.logprobs) if chunk.logprobs else None,
            "finish_reason": finish,
        }
        if chunk.token_ids is not None:
            choice["token_ids"] = chunk.token_ids
        if finish is not None:
            choice["stop_reason"] = chunk.stop
        return choice

    def _finish(self, chunk: Chunk, parser: AnswerParser) -> responses.FinishName | None:
        """Return "tool_calls" for an answer that has calls, but not if the client named the one tool to call: OpenAI
        and vLLM report "stop" then."""
        is_call = chunk.finish == "stop" and parser.num_calls > 0 and self.output.tools.parser is not NamedParser
        return "tool_calls" if is_call else chunk.finish

    def _parsed(self, choice: int, events: list[ParsedEvent]) -> responses.MessageDelta:
        """Return one delta for all events: texts of a kind are joined, and so are the parts of a call."""
        delta: responses.MessageDelta = {}
        calls: dict[int, responses.CallDelta] = {}
        for event in events:
            match event:
                case Content(text):
                    delta["content"] = (delta.get("content") or "") + text
                case Reasoning(text):
                    self.reasoning.add(text, choice)
                    if self._shows_reasoning:
                        delta["reasoning_content"] = delta["reasoning"] = delta.get("reasoning", "") + text
                case CallStart(index, id, name):
                    calls[index] = {
                        "index": index,
                        "id": id,
                        "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }
                case Arguments(index, text):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta


Dialect = CompletionDialect | ChatDialect
"""The JSON of one HTTP response."""
