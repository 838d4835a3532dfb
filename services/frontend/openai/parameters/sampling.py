"""Sampling parameters: values of the body, else the checkpoint's defaults, else OpenAI's."""

import logging
import secrets
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.codec import pack
from protocol.sampling import MAX_BAD_WORD_TOKENS, MAX_BIAS, MAX_PENALTY, BadWords, SamplingParams
from services.checkpoint import CheckpointError, named_eos, read_json
from services.config.frontend import DEFAULT_PARAMETERS, MAX_NEW_TOKENS
from services.frontend.errors import APIError, beyond_context, invalid
from services.frontend.openai.schemas.requests import ChatRequest, CompletionRequest

log = logging.getLogger("runahead.frontend")

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions. That for chat is the checkpoint's, else the rest of the context."""


@dataclass(frozen=True)
class SamplingDefaults:
    """The checkpoint's defaults, from generation_config.json and config.json, and those of the server."""

    sampling: dict[str, Any]
    eos_token_ids: tuple[int, ...]
    chat_tokens: int = sys.maxsize
    """Default of `max_tokens` for chat."""
    max_tokens: int = sys.maxsize
    """Limit of the server for all answers; no request raises it."""

    @classmethod
    def read(
        cls,
        directory: Path,
        tokenizer_eos: int | None,
        use_sampling: bool,
        overrides: Mapping[str, float] | None = None,
    ) -> "SamplingDefaults":
        """
        Args:
            use_sampling: read the sampling parameters too, not only the EOS tokens.
            overrides: values that replace the checkpoint's; they are valid.

        Raises: CheckpointError, for values that no request could be served with
        """
        generation = read_json(directory, "generation_config.json")
        eos = dict.fromkeys(named_eos(directory))
        if tokenizer_eos is not None:
            eos[tokenizer_eos] = None
        given = {name: generation[name] for name in DEFAULT_PARAMETERS if generation.get(name) is not None}
        path, bounds = directory / "generation_config.json", f"between -{MAX_PENALTY} and {MAX_PENALTY}"
        for name in ("presence_penalty", "frequency_penalty"):  # few servers read these, so a wrong one stops no start
            value = given.get(name, 0)
            if not isinstance(value, int | float) or not -MAX_PENALTY <= value <= MAX_PENALTY:
                log.warning("%s: %s %.80r is ignored; it must be a number %s", path, name, given.pop(name), bounds)
        _check(directory, eos, given)
        chat_tokens, overrides = generation.get(MAX_NEW_TOKENS) or sys.maxsize, dict(overrides or {})
        if type(chat_tokens) is not int or chat_tokens < 1:
            log.warning("%s: %s %.80r is ignored; it must be at least 1", path, MAX_NEW_TOKENS, chat_tokens)
            chat_tokens = sys.maxsize
        max_tokens = int(overrides.pop(MAX_NEW_TOKENS, sys.maxsize))
        sampling = {**(given if use_sampling else {}), **overrides}
        return cls(sampling, tuple(eos), chat_tokens if use_sampling else sys.maxsize, max_tokens)


def _check(directory: Path, eos: Collection[object], given: Mapping[str, object]) -> None:
    numbers = all(isinstance(value, int | float) for value in given.values())
    if not numbers or not all(type(token) is int and 0 <= token < 2**31 for token in eos):
        wrong = "a sampling default is not a number" if not numbers else "an eos_token_id is not a token id"
        raise CheckpointError(f"{directory}: {wrong}; correct generation_config.json")
    try:
        SamplingParams(1, **_numbers(given))
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"{directory / 'generation_config.json'}: {error}") from None


def _numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of `SamplingParams`, in which a `top_k` of -1 is 0."""
    return {name: max(int(value), 0) if name == "top_k" else float(value) for name, value in given.items()}


def sampling_params(
    body: CompletionRequest | ChatRequest,
    defaults: SamplingDefaults,
    prompt_tokens: int,
    max_model_len: int,
    vocab_size: int,
    bad_words: BadWords = (),
) -> SamplingParams:
    """Return the parameters of the first answer.

    Args:
        bad_words: the body's, as tokens.

    Raises: APIError, if prompt and output do not fit the context, or a value is out of range
    """
    max_tokens, source = _max_tokens(body, defaults, prompt_tokens, max_model_len)
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise invalid(f"min_tokens {body.min_tokens} is more than max_tokens {max_tokens}{source}", "min_tokens")
    given = {name: value for name in DEFAULT_PARAMETERS if (value := getattr(body, name)) is not None}
    logprobs, prompt_logprobs = _logprobs(body)
    eos = () if body.ignore_eos else defaults.eos_token_ids
    stop_ids = checked_ids(body.stop_token_ids or [], vocab_size, "stop_token_ids")
    checked_ids([token for word in bad_words for token in word], vocab_size, "bad_words")
    try:
        return SamplingParams(
            max(max_tokens, 1),  # echoing only the prompt still takes a step
            **_numbers({**defaults.sampling, **given}),
            seed=secrets.randbits(64) if body.seed is None else body.seed % 2**64,
            min_tokens=body.min_tokens or 0,
            eos_token_ids=tuple(token for token in eos if token < vocab_size),
            stop_token_ids=tuple(dict.fromkeys(stop_ids)),
            logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
            bad_words=bad_words,
            allowed_token_ids=pack(
                sorted({*checked_ids(body.allowed_token_ids or [], vocab_size, "allowed_token_ids")})
            ),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
    except ValueError as error:
        raise invalid(str(error)) from None


def checked_ids(ids: list[int], vocab_size: int, param: str) -> list[int]:
    """Raises: APIError, for ids beyond the model's logits"""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        outside = next(token for token in ids if not 0 <= token < vocab_size)
        raise invalid(f"{param}: token {outside} is not between 0 and {vocab_size - 1}", param)
    return ids


def _logit_bias(given: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            message = f"logit_bias: {key!r:.80} is not a token id"
            raise invalid(message, "logit_bias", logged="logit_bias: a key is not a token id")
        (token,) = checked_ids([int(key)], vocab_size, "logit_bias")
        if token in biases:
            raise invalid(f"logit_bias names the token {token} twice", "logit_bias")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise invalid(
                f"logit_bias: {bias} of token {token} is not between -{MAX_BIAS} and {MAX_BIAS}", "logit_bias"
            )
        biases[token] = float(bias)
    return tuple(biases.items())


def _logprobs(body: CompletionRequest | ChatRequest) -> tuple[int | None, int | None]:
    """Return the number of most likely tokens for each output position and each prompt position; None for no
    log-probabilities. Raises: APIError"""
    if isinstance(body, CompletionRequest):
        output, prompt = body.logprobs, body.prompt_logprobs
        if body.echo and output is not None:
            prompt = max(output, prompt or 0)
    else:
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs is only allowed when logprobs is true", "top_logprobs")
        output, prompt = (body.top_logprobs or 0) if body.logprobs else None, body.prompt_logprobs
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs is not available when stream is true", "prompt_logprobs")
    return output, prompt


def bad_words(words: list[str], encode: Callable[[str], list[int]]) -> BadWords:
    """Return the tokens of each word, at the beginning of a text and, if they differ, within one: vLLM's rule.

    Raises: APIError
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        bare = word.lstrip()
        alone, inside = tuple(encode(bare)), tuple(encode(f" {bare}"))
        if not 0 < len(alone) <= MAX_BAD_WORD_TOKENS:
            raise invalid(
                f"bad_words: {word!r:.80} has {len(alone)} tokens; 1 to {MAX_BAD_WORD_TOKENS} are allowed",
                "bad_words",
                logged=f"bad_words: a word has {len(alone)} tokens",
            )
        found.append(alone)
        if len(inside) == len(alone) and inside[0] != alone[0]:
            found.append(inside)
    return tuple(dict.fromkeys(found))


def _max_tokens(
    body: CompletionRequest | ChatRequest, defaults: SamplingDefaults, prompt_tokens: int, max_model_len: int
) -> tuple[int, str]:
    """Return the number, at least 1, or 0 with `echo`; and the source of one that is not the request's, in brackets.

    Raises: APIError, naming the lengths
    """
    is_chat = isinstance(body, ChatRequest)
    prompt, room = "messages" if is_chat else "prompt", max_model_len - prompt_tokens
    if prompt_tokens < 1:
        raise invalid("the prompt is empty", prompt)
    if room < 1:
        raise too_long(prompt_tokens, max_model_len, prompt)
    name, given = "max_tokens", body.max_tokens
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        name, given = "max_completion_tokens", body.max_completion_tokens
    if given == 0 and not body.echo:
        raise invalid("max_tokens must be at least 1; 0 is only allowed with echo", name)
    limit = defaults.max_tokens, f" ({MAX_NEW_TOKENS} of the server)"
    if given is None:
        default = COMPLETION_MAX_TOKENS, " (the default)"
        if is_chat:
            default = defaults.chat_tokens, f" ({MAX_NEW_TOKENS} of generation_config.json)"
        return min(default, limit, (room, " (the rest of the context)"))
    if given > room:
        raise beyond_context(
            f"This model's maximum context length is {max_model_len} tokens, but the request asks for {given} "
            f"output tokens after a prompt of {prompt_tokens}; at most {room} are possible",
            f"input length and `max_tokens` exceed context limit: {prompt_tokens} + {given} > {max_model_len}, "
            "decrease input length or `max_tokens` and try again",
            name,
        )
    return min((given, ""), limit)


def too_long(
    prompt_tokens: int, max_model_len: int, param: str, at_least: bool = False, generates: bool = True
) -> APIError:
    return beyond_context(
        f"This model's maximum context length is {max_model_len} tokens, but the prompt has "
        f"{'at least ' if at_least else ''}{prompt_tokens}; shorten it to {max_model_len - generates} or fewer",
        f"prompt is too long: {prompt_tokens} tokens > {max_model_len - generates} maximum",
        param,
    )
