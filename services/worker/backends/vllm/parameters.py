"""Sampling parameters of a request as vLLM's, and the random numbers of a request."""

import numpy as np
import torch

from protocol.sampling import SamplingParams
from services.worker.backends.vllm import vllm_api


def to_vllm_params(params: SamplingParams, vocab_size: int) -> vllm_api.SamplingParams:
    """Return vLLM's parameters of equal meaning.

    The scheduler decides when a request ends, so end tokens are passed only for `min_tokens`, which suppresses them.
    Ids outside the vocabulary have no effect, and vLLM would fail on them, so they are left out.
    """
    result = vllm_api.SamplingParams(
        temperature=min(params.temperature, 1.0),
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        stop_token_ids=[token for token in params.eos_token_ids + params.stop_token_ids if token < vocab_size],
        logit_bias={token: bias for token, bias in params.logit_bias if token < vocab_size} or None,
        allowed_token_ids=_allowed_token_ids(params, vocab_size),
        logprobs=_limited(params.logprobs, vocab_size),
        prompt_logprobs=_limited(params.prompt_logprobs, vocab_size),
        max_tokens=params.max_tokens,
        detokenize=False,
        skip_clone=True,
    )
    # The rest is set afterwards, because vLLM's sampler supports these values but its constructor refuses them.
    if params.temperature > 1.0:
        result.temperature = params.temperature
    result.min_tokens = params.min_tokens
    words = [list(word) for word in params.bad_words if max(word) < vocab_size]
    result._bad_words_token_ids = words or None  # noqa: SLF001  publicly set from text only
    if params.min_tokens:
        # With a grammar, vLLM allows stop tokens where nothing else is allowed. Any grammar sets this; it is not used.
        result.structured_outputs = vllm_api.StructuredOutputsParams(json_object=True)
    return result


def _allowed_token_ids(params: SamplingParams, vocab_size: int) -> list[int] | None:
    """Return the allowed ids, or None for all. If none of them is in the vocabulary, id 0 is allowed, as on every
    backend."""
    if not params.allowed_token_ids:
        return None
    allowed = np.frombuffer(params.allowed_token_ids, np.int32)
    return allowed[allowed < vocab_size].tolist() or [0]


def _limited(count: int | None, vocab_size: int) -> int | None:
    return None if count is None else min(count, vocab_size)


class RequestGenerator(torch.Generator):
    """Random numbers of one request for vLLM's sampler: one draw for each output token.

    vLLM draws for every row, and takes the draw back if the row's token is discarded. It does so by the generator's
    offset, which only CUDA has, so here every offset means the state that was kept: at first the one at which the
    request entered, because nothing is drawn before the prompt is complete.
    """

    _kept: torch.Tensor

    @classmethod
    def after_draws(cls, seed: int, num_draws: int) -> "RequestGenerator":
        """Return the generator of a request that has `num_draws` output tokens."""
        generator = cls()
        generator.manual_seed(seed)
        torch.randint(0, 2**31, (num_draws,), generator=generator)
        generator.keep_state()
        return generator

    def keep_state(self) -> None:
        """The next draws may be taken back."""
        self._kept = self.get_state()

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self.set_state(self._kept)
