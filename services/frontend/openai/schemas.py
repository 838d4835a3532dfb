"""The bodies that clients send. Every field has a bound; a field that is not served is refused by name."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 128
MAX_PROMPTS = 64
MAX_TEXT = 4_000_000
"""Characters of one text."""
MAX_PROMPT_IDS = 2_000_000
MAX_MESSAGES = 4096

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_PROMPT_IDS)]
Stop = Annotated[str, Field(max_length=MAX_STOP_CHARS)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class Request(BaseModel):
    """What completions and chat share."""

    model_config = ConfigDict(extra="allow", strict=True)
    model: str | None = Field(None, max_length=512)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=1000, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = False
    priority: int | None = Field(0, ge=-(2**20), le=2**20)
    cache_salt: str | None = Field(None, max_length=256)
    user: str | None = Field(None, max_length=512)
    """For the client's own books; OpenAI uses it to watch for abuse."""

    def stops(self) -> list[str]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in given if stop]


class CompletionRequest(Request):
    prompt: (
        Text | TokenIds | Annotated[list[Text], Field(max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS)]
    )  # fmt: skip


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: Text


class Message(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=1024)] | None = None
    name: str | None = Field(None, max_length=256)

    def plain(self) -> dict[str, Any]:
        """As templates take it."""
        parts = self.content if isinstance(self.content, list) else []
        text = "".join(part.text for part in parts) if parts else self.content or ""
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


class ChatRequest(Request):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)


Neutral = Mapping[str, tuple[Any, ...]]
"""Parameters that are not served, and the values under which they change nothing (null always does)."""

NEUTRAL: Neutral = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "return_token_ids": (False,),
    "prompt_embeds": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "reasoning_effort": (),
    "audio": (),
    "prediction": (),
    "store": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "use_beam_search": (False,),
}
NEUTRAL_IN_MESSAGE: Neutral = {
    "refusal": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "audio": (),
    "annotations": ([],),
    "reasoning": (),
    "reasoning_content": (),
}
"""The official client sends these back when an answer becomes part of the next conversation."""
