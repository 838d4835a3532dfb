"""What a request asks of the sampler. Names and meanings are vLLM's where the meaning is the same."""

import msgspec


class SamplingParams(msgspec.Struct, array_like=True, frozen=True):
    """Sampling parameters of one request, complete and validated: nothing is left to default later.

    Structs are `array_like`: evolve them by appending fields with defaults, never by reordering.
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
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end the text. Empty under `ignore_eos`."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens the client asked to stop at; unlike EOS they are named in `stop_reason`."""
