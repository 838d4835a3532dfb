"""What a request asks of the sampler. Names and meanings are vLLM's where the meaning is the same."""

from typing import Annotated

import msgspec

from protocol.fields import Count

MAX_TEMPERATURE = 1000.0
MAX_END_TOKENS = 1024
"""Most ids in `eos_token_ids`, and in `stop_token_ids`."""

TokenIds = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_END_TOKENS)]


class SamplingParams(msgspec.Struct, array_like=True, frozen=True):
    """Sampling parameters of one request, complete and validated: nothing is left to default later.

    Raises: ValueError, when made with a value out of range; the text is fit for the client's eyes.
    """

    max_tokens: int
    """Most output tokens, at least 1. The context limit may end a request earlier."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
    min_p: float = 0.0
    seed: int = 0
    """64 bits unsigned. The frontend draws one at admission when the client gave none, so that a replay repeats."""
    min_tokens: int = 0
    """Until this many output tokens exist, `eos_token_ids` and `stop_token_ids` cannot be sampled."""
    eos_token_ids: TokenIds = ()
    """Tokens that end the text. Empty under `ignore_eos`."""
    stop_token_ids: TokenIds = ()
    """Tokens the client asked to stop at; unlike EOS they are named in `stop_reason`."""

    def __post_init__(self) -> None:
        """Runs in the frontend, which makes one, and in every process that decodes one."""
        if not 1 <= self.max_tokens < 2**31:
            raise ValueError(f"max_tokens must be at least 1 and below 2**31, got {self.max_tokens}")
        if not 0 <= self.temperature <= MAX_TEMPERATURE:  # false for NaN, like the two below
            raise ValueError(f"temperature must lie between 0 and {MAX_TEMPERATURE}, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie between 0 and 1, got {self.min_p}")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be at least 0 (all tokens) and below 2**31, got {self.top_k}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be at least 0 and below 2**64, got {self.seed}")
        if not 0 <= self.min_tokens < 2**31:
            raise ValueError(f"min_tokens must be at least 0 and below 2**31, got {self.min_tokens}")
        if max(len(self.eos_token_ids), len(self.stop_token_ids)) > MAX_END_TOKENS:
            raise ValueError(f"at most {MAX_END_TOKENS} stop_token_ids are allowed")
