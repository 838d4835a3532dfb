"""A validated body to sampling parameters: client, then the checkpoint's defaults, then OpenAI's."""

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.sampling import SamplingParams
from services.frontend.errors import invalid
from services.frontend.openai.schemas import NEUTRAL, ChatRequest, CompletionRequest
from services.frontend.tokenizer import read_json

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; chat takes what the context leaves."""


@dataclass(frozen=True)
class Defaults:
    """What the checkpoint says about sampling, from generation_config.json and config.json."""

    sampling: dict[str, Any]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, directory: Path, eos_of_tokenizer: int | None, use_sampling: bool) -> "Defaults":
        """Raises: CheckpointError"""
        generation, model = (
            read_json(directory / "generation_config.json"),
            read_json(directory / "config.json"),
        )
        ids = generation.get("eos_token_id", model.get("eos_token_id"))
        eos = dict.fromkeys(ids if isinstance(ids, list) else [] if ids is None else [ids])
        if eos_of_tokenizer is not None:
            eos[eos_of_tokenizer] = None
        names = ("temperature", "top_p", "top_k", "min_p")
        given = {
            name: generation[name] for name in names if use_sampling and generation.get(name) is not None
        }
        return cls(given, tuple(eos))


def refuse_unserved(body: CompletionRequest | ChatRequest) -> None:
    """Raises: APIError, naming the first parameter that is not served or not known."""
    for name, value in (body.model_extra or {}).items():
        if value is None or any(
            value == neutral and type(value) is type(neutral) for neutral in NEUTRAL.get(name, ())
        ):
            continue
        known = "is not supported" if name in NEUTRAL else "is not a known parameter"
        raise invalid(f"{name} {known}" + (f" with the value {value!r:.80}" if name in NEUTRAL else ""), name)


def sampling_params(
    body: CompletionRequest | ChatRequest,
    defaults: Defaults,
    prompt_tokens: int,
    max_model_len: int,
    vocab_size: int,
) -> SamplingParams:
    """Raises: APIError, if prompt and output do not fit the context, or a value is out of range."""
    room = max_model_len - prompt_tokens
    if prompt_tokens < 1:
        raise invalid("the prompt is empty", "prompt" if isinstance(body, CompletionRequest) else "messages")
    if room < 1:
        raise invalid(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt has {prompt_tokens}; "
            "shorten it by at least " + str(1 - room),
            "prompt" if isinstance(body, CompletionRequest) else "messages",
        )
    wanted = body.max_tokens
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        wanted = body.max_completion_tokens
    if wanted is not None and wanted > room:
        raise invalid(
            f"This model's maximum context length is {max_model_len} tokens, but the request asks for {wanted} output "
            f"tokens after a prompt of {prompt_tokens}; at most {room} are possible",
            "max_tokens",
        )
    if wanted is None:
        wanted = min(room, COMPLETION_MAX_TOKENS) if isinstance(body, CompletionRequest) else room
    if body.min_tokens is not None and body.min_tokens > wanted:
        raise invalid(f"min_tokens {body.min_tokens} is more than max_tokens {wanted}", "min_tokens")
    for token in body.stop_token_ids or ():
        if token >= vocab_size:
            raise invalid(f"stop_token_ids: {token} is not among the {vocab_size} tokens", "stop_token_ids")

    def pick(name: str, fallback: float) -> Any:
        value = getattr(body, name)
        return value if value is not None else defaults.sampling.get(name, fallback)

    try:
        return SamplingParams(
            max_tokens=wanted,
            temperature=float(pick("temperature", 1.0)),
            top_p=float(pick("top_p", 1.0)),
            top_k=max(int(pick("top_k", 0)), 0),
            min_p=float(pick("min_p", 0.0)),
            seed=secrets.randbits(64) if body.seed is None else body.seed % 2**64,
            min_tokens=body.min_tokens or 0,
            eos_token_ids=() if body.ignore_eos else defaults.eos_token_ids,
            stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids or ())),
        )
    except ValueError as error:
        raise invalid(str(error)) from None
