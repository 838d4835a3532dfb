"""What a request asks of the sampler, in vLLM's words."""

import numpy as np
import torch

from protocol.sampling import SamplingParams
from services.worker.backends.vllm import names


def translated(params: SamplingParams, vocab_size: int) -> names.SamplingParams:
    """Every field of ours, but `eos_token_ids` where no `min_tokens` need them and `max_tokens`: when a request ends
    is the scheduler's to say. Ids outside the vocabulary are nobody's; vLLM would fail on them."""
    theirs = names.SamplingParams(
        temperature=min(params.temperature, 1.0),
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        stop_token_ids=_known(params.eos_token_ids + params.stop_token_ids, vocab_size),
        logit_bias={token: bias for token, bias in params.logit_bias if token < vocab_size} or None,
        allowed_token_ids=_allowed(params, vocab_size),
        logprobs=_at_most(params.logprobs, vocab_size),
        prompt_logprobs=_at_most(params.prompt_logprobs, vocab_size),
        max_tokens=params.max_tokens,
        detokenize=False,
        skip_clone=True,
    )
    # What follows is set afterwards: vLLM's frontend refuses it, its sampler serves it.
    if params.temperature > 1.0:
        theirs.temperature = params.temperature
    theirs.min_tokens = params.min_tokens
    words = [list(word) for word in params.bad_words if max(word) < vocab_size]
    theirs._bad_words_token_ids = words or None
    if params.min_tokens:
        # This alone makes stop tokens come back where a grammar leaves nothing else; the grammar itself is ours.
        theirs.structured_outputs = names.StructuredOutputsParams(json_object=True)
    return theirs


def _known(token_ids: tuple[int, ...], vocab_size: int) -> list[int]:
    return [token for token in token_ids if token < vocab_size]


def _allowed(params: SamplingParams, vocab_size: int) -> list[int] | None:
    """Where nothing is left, id 0, as everywhere in this project."""
    if not params.allowed_token_ids:
        return None
    allowed = np.frombuffer(params.allowed_token_ids, np.int32)
    return allowed[allowed < vocab_size].tolist() or [0]


def _at_most(wanted: int | None, vocab_size: int) -> int | None:
    return None if wanted is None else min(wanted, vocab_size)


class Generator(torch.Generator):
    """vLLM's source of noise for one request: to each output token belongs one draw.

    vLLM draws for every row, and takes the draw back where a prompt is not yet complete. That is written for CUDA, by
    offset; here it leads back to where the request entered, as nothing else was drawn by then.
    """

    _entered: torch.Tensor

    @classmethod
    def after(cls, seed: int, num_drawn: int) -> "Generator":
        """As it is after `num_drawn` output tokens."""
        generator = cls()
        generator.manual_seed(seed)
        for _ in range(num_drawn):
            torch.randint(0, 2**31, (1,), generator=generator)
        generator._entered = generator.get_state()
        return generator

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self.set_state(self._entered)
