"""Sampling parameters by name: the columns of the permutation matrix, and more."""

from random import Random

import msgspec

from protocol.codec import pack
from protocol.sampling import SamplingParams, StructuredOutputParams
from tests.simulation.grammar import structured

STRUCTURED = "structured"
MATRIX = (
    "none",
    "penalties",
    "bad words",
    "logprobs",
    "prompt logprobs",
    STRUCTURED,
    f"{STRUCTURED} + penalties + logprobs",
)
OTHERS = ("bias", "allowed ids", "min tokens", f"{STRUCTURED} + bad words + prompt logprobs")


def with_parameters(
    name: str, base: SamplingParams, rng: Random, vocab: int
) -> tuple[SamplingParams, StructuredOutputParams | None]:
    """Return `base` with the parameters that `name` lists, drawn so that they change the answer, and a grammar if
    listed."""
    changes: dict[str, object] = {}
    for part in name.split(" + "):
        changes |= _part(part, rng, vocab)
    grammar = structured(rng.randrange(2**32)) if STRUCTURED in name else None
    return msgspec.structs.replace(base, **changes), grammar


def _part(part: str, rng: Random, vocab: int) -> dict[str, object]:
    match part:
        case "none" | "structured":
            return {}
        case "penalties":
            return {
                "presence_penalty": rng.choice((-1.5, 1.5)),
                "frequency_penalty": rng.choice((-2.0, -1.0, 0.5)),
                "repetition_penalty": rng.choice((0.3, 0.5, 2.0)),
            }
        case "bad words":
            some = rng.sample(range(vocab), vocab // 2)
            pairs = [(rng.randrange(vocab), rng.randrange(vocab)) for _ in range(min(vocab, 200))]
            return {"bad_words": (*((token,) for token in some), *pairs)}
        case "logprobs":
            return {"logprobs": rng.choice((0, 2, 5))}
        case "prompt logprobs":
            return {"prompt_logprobs": rng.choice((0, 3))}
        case "bias":
            return {"logit_bias": tuple((t, rng.uniform(-20, 9)) for t in rng.sample(range(vocab), vocab // 2))}
        case "allowed ids":
            return {"allowed_token_ids": pack(sorted(rng.sample(range(vocab), max(1, vocab // 4))))}
        case "min tokens":
            ends = tuple(rng.sample(range(vocab), vocab // 3))
            return {"min_tokens": 5, "stop_token_ids": ends, "bad_words": ((ends[0],),)}
    raise ValueError(f"no parameter is called {part!r}")
