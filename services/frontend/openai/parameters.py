"""A validated body to sampling parameters: client, then the checkpoint's defaults, then OpenAI's."""

import logging
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.sampling import SamplingParams
from services.checkpoint import CheckpointError
from services.frontend.errors import APIError, invalid
from services.frontend.openai.schemas import NEUTRAL, ChatRequest, CompletionRequest, Neutral
from services.frontend.tokenizer import read_json

log = logging.getLogger("runahead.frontend")

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; chat takes what the context leaves."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True)
class Defaults:
    """What the checkpoint says about sampling, from generation_config.json and config.json."""

    sampling: dict[str, Any]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, directory: Path, eos_of_tokenizer: int | None, use_sampling: bool) -> "Defaults":
        """Raises: CheckpointError, for values that no request could be served with."""
        generation = read_json(directory / "generation_config.json")
        model = read_json(directory / "config.json")
        ids = generation.get("eos_token_id", model.get("eos_token_id"))
        eos = dict.fromkeys(ids if isinstance(ids, list) else [] if ids is None else [ids])
        if eos_of_tokenizer is not None:
            eos[eos_of_tokenizer] = None
        given = {name: generation[name] for name in _SAMPLING if generation.get(name) is not None}
        _check(directory, eos, given)
        if generation.get("repetition_penalty") not in (None, 1, 1.0) and use_sampling:
            log.warning("generation_config.json asks for a repetition_penalty; it is not supported")
        return cls(given if use_sampling else {}, tuple(eos))


def _check(directory: Path, eos: Collection[object], given: Mapping[str, object]) -> None:
    numbers = all(isinstance(value, int | float) for value in given.values())
    if not numbers or not all(type(token) is int and 0 <= token < 2**31 for token in eos):
        wrong = "a sampling default is no number" if not numbers else "an eos_token_id is no token id"
        raise CheckpointError(f"{directory}: {wrong}; correct generation_config.json")
    try:
        SamplingParams(1, **_complete(given))
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"{directory / 'generation_config.json'}: {error}") from None


def _complete(given: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields of `SamplingParams`; OpenAI's defaults for what is not given."""
    return {
        "temperature": float(given.get("temperature", 1.0)),
        "top_p": float(given.get("top_p", 1.0)),
        "top_k": max(int(given.get("top_k", 0)), 0),
        "min_p": float(given.get("min_p", 0.0)),
    }


def refuse_unserved(extra: Mapping[str, Any], neutral: Neutral = NEUTRAL, within: str = "") -> None:
    """Raises: APIError, naming the first parameter that is not served or not known."""
    for name, value in extra.items():
        allowed = neutral.get(name, ())
        if value is None or any(value == other and type(value) is type(other) for other in allowed):
            continue
        what = f"is not supported with the value {value!r:.80}" if name in neutral else "is not known"
        raise invalid(f"{within}{name:.80} {what}; leave it out", (within or name).partition(".")[0])


def sampling_params(
    body: CompletionRequest | ChatRequest,
    defaults: Defaults,
    prompt_tokens: int,
    max_model_len: int,
    vocab_size: int,
) -> SamplingParams:
    """Raises: APIError, if prompt and output do not fit the context, or a value is out of range."""
    max_tokens = _max_tokens(body, prompt_tokens, max_model_len)
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise invalid(f"min_tokens {body.min_tokens} is more than max_tokens {max_tokens}", "min_tokens")
    for token in body.stop_token_ids or ():
        if token >= vocab_size:
            raise invalid(f"stop_token_ids: {token} is not among the {vocab_size} tokens", "stop_token_ids")
    asked = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    eos = () if body.ignore_eos else defaults.eos_token_ids
    try:
        return SamplingParams(
            max_tokens,
            **_complete({**defaults.sampling, **asked}),
            seed=secrets.randbits(64) if body.seed is None else body.seed % 2**64,
            min_tokens=body.min_tokens or 0,
            eos_token_ids=tuple(token for token in eos if token < vocab_size),
            stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids or ())),
        )
    except ValueError as error:
        raise invalid(str(error)) from None


def _max_tokens(body: CompletionRequest | ChatRequest, prompt_tokens: int, max_model_len: int) -> int:
    """At least 1. Raises: APIError, naming the lengths"""
    is_chat = isinstance(body, ChatRequest)
    prompt, room = "messages" if is_chat else "prompt", max_model_len - prompt_tokens
    if prompt_tokens < 1:
        raise invalid("the prompt is empty", prompt)
    if room < 1:
        raise too_long(prompt_tokens, max_model_len, prompt)
    name, wanted = "max_tokens", body.max_tokens
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        name, wanted = "max_completion_tokens", body.max_completion_tokens
    if wanted is None:
        return room if is_chat else min(room, COMPLETION_MAX_TOKENS)
    if wanted > room:
        raise invalid(
            f"This model's maximum context length is {max_model_len} tokens, but the request asks for {wanted} "
            f"output tokens after a prompt of {prompt_tokens}; at most {room} are possible",
            name,
        )
    return wanted


def too_long(prompt_tokens: int, max_model_len: int, param: str, at_least: bool = False) -> APIError:
    return invalid(
        f"This model's maximum context length is {max_model_len} tokens, but the prompt has "
        f"{'at least ' if at_least else ''}{prompt_tokens}; shorten it to {max_model_len - 1} or fewer",
        param,
    )
