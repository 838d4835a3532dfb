"""Sampling parameters of a request. The names are vLLM's where the meaning is the same."""

import enum
import math
from typing import Annotated

import msgspec

from protocol.fields import Count, Finite

MAX_TEMPERATURE = 1000.0
MAX_END_TOKENS = 1024
"""Maximum number of ids in `eos_token_ids`, and in `stop_token_ids`."""
MAX_PENALTY = 2.0
"""Bound of the presence and frequency penalty, in both directions: OpenAI's range."""
MAX_REPETITION_PENALTY = 1e30
MAX_BIAS = 100.0
"""Bound of a `logit_bias`, in both directions: OpenAI's range."""
MAX_BIASED = 1024
"""Maximum number of tokens with a `logit_bias`."""
MAX_BAD_WORDS = 512
"""Maximum number of token sequences in `bad_words`."""
MAX_BAD_WORD_TOKENS = 128
"""Maximum length of a sequence in `bad_words`, tokens."""
MAX_GRAMMAR_CHARS = 262_144
"""Maximum length of the text of `StructuredOutputParams`."""
MAX_LOGPROBS = 20
"""Maximum number of alternatives per position in `logprobs` and `prompt_logprobs`."""

TokenIds = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_END_TOKENS)]
Biases = Annotated[tuple[tuple[Count, Finite], ...], msgspec.Meta(max_length=MAX_BIASED)]
BadWord = Annotated[tuple[Count, ...], msgspec.Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]
BadWords = Annotated[tuple[BadWord, ...], msgspec.Meta(max_length=MAX_BAD_WORDS)]


class SamplingParams(msgspec.Struct, array_like=True, frozen=True):
    """Sampling parameters of one request, complete and validated.

    Raises: ValueError, if a value is out of range; the text is for the client.
    """

    max_tokens: int
    """Maximum number of output tokens, at least 1. The context limit may end a request earlier."""
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    seed: int = 0
    """64 bits unsigned. The frontend draws a seed at admission if the client gave none, so that a replay repeats."""
    min_tokens: int = 0
    """Number of output tokens before `eos_token_ids` and `stop_token_ids` may be sampled."""
    eos_token_ids: TokenIds = ()
    """End-of-sequence tokens. Empty with `ignore_eos`."""
    stop_token_ids: TokenIds = ()
    """Further tokens at which the output stops. Unlike EOS, they are reported in `stop_reason`."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that occurs in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each of its occurrences in the output."""
    repetition_penalty: float = 1.0
    """Divides a positive logit, and multiplies a negative one, of each token in prompt or output. 1: no penalty."""
    logit_bias: Biases = ()
    """(token id, addend of its logit); each id at most once."""
    bad_words: BadWords = ()
    """Token sequences that must not occur in the output: the last token is forbidden after the others."""
    allowed_token_ids: bytes = b""
    """int32, ascending: the only tokens that may be sampled. Empty: all tokens."""
    logprobs: Count | None = None
    """Number of most likely tokens whose log-probabilities are returned for each output token, beside its own. They are
    computed from the logits of the model, before any parameter here changes them (vLLM's `raw_logprobs`). None: no
    log-probabilities."""
    prompt_logprobs: Count | None = None
    """As `logprobs`, for each prompt token but the first. Such a request reads no prefix cache."""

    def __post_init__(self) -> None:
        """Check the values, in the frontend that makes the parameters and in every process that decodes them."""
        for name, least, most, text in _BOUNDS:
            if (value := getattr(self, name)) is not None and not least <= value <= most:  # false for NaN
                raise ValueError(f"{name} must {text}, got {value}")
        if max(len(self.eos_token_ids), len(self.stop_token_ids)) > MAX_END_TOKENS:
            raise ValueError(f"at most {MAX_END_TOKENS} stop_token_ids are allowed")
        if len(self.logit_bias) > MAX_BIASED:
            raise ValueError(f"logit_bias may name at most {MAX_BIASED} tokens")
        if any(not -MAX_BIAS <= bias <= MAX_BIAS for _, bias in self.logit_bias):
            raise ValueError(f"a logit_bias must lie between -{MAX_BIAS} and {MAX_BIAS}")
        if len({token for token, _ in self.logit_bias}) != len(self.logit_bias):
            raise ValueError("logit_bias names a token twice")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise ValueError(f"at most {MAX_BAD_WORDS} bad_words are allowed")
        if not all(0 < len(word) <= MAX_BAD_WORD_TOKENS for word in self.bad_words):
            raise ValueError(f"a bad word must have between 1 and {MAX_BAD_WORD_TOKENS} tokens")
        if len(self.allowed_token_ids) % 4:
            raise ValueError("allowed_token_ids must be a column of int32")

    @property
    def penalizes(self) -> bool:
        """True if penalties make the logits depend on earlier tokens."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


_ABOVE_0 = math.ulp(0.0)
_BOUNDS: tuple[tuple[str, float, float, str], ...] = (
    ("max_tokens", 1, 2**31 - 1, "be at least 1 and below 2**31"),
    ("temperature", 0, MAX_TEMPERATURE, f"lie between 0 and {MAX_TEMPERATURE}"),
    ("top_p", _ABOVE_0, 1, "be above 0 and at most 1"),
    ("min_p", 0, 1, "lie between 0 and 1"),
    ("top_k", 0, 2**31 - 1, "be at least 0 (all tokens) and below 2**31"),
    ("seed", 0, 2**64 - 1, "be at least 0 and below 2**64"),
    ("min_tokens", 0, 2**31 - 1, "be at least 0 and below 2**31"),
    ("presence_penalty", -MAX_PENALTY, MAX_PENALTY, f"lie between -{MAX_PENALTY} and {MAX_PENALTY}"),
    ("frequency_penalty", -MAX_PENALTY, MAX_PENALTY, f"lie between -{MAX_PENALTY} and {MAX_PENALTY}"),
    ("repetition_penalty", _ABOVE_0, MAX_REPETITION_PENALTY, f"be above 0 and at most {MAX_REPETITION_PENALTY}"),
    ("logprobs", 0, MAX_LOGPROBS, f"lie between 0 and {MAX_LOGPROBS}"),
    ("prompt_logprobs", 0, MAX_LOGPROBS, f"lie between 0 and {MAX_LOGPROBS}"),
)
"""Fields with their least and greatest values, and what an error says that a value must do."""


class GrammarKind(enum.IntEnum):
    """Kind of `StructuredOutputParams.text`: the fields of vLLM's `structured_outputs`."""

    JSON = 0
    """A JSON schema."""
    JSON_OBJECT = 1
    """Any JSON object; the text is empty."""
    REGEX = 2
    CHOICE = 3
    """A JSON array of strings."""
    GRAMMAR = 4
    """Lark, or llama.cpp's GBNF."""
    STRUCTURAL_TAG = 5
    """OpenAI's and vLLM's JSON for text with structured parts."""


class StructuredOutputParams(msgspec.Struct, array_like=True, frozen=True):
    """Grammar that the whole output must match. The scheduler compiles it and may refuse it."""

    kind: GrammarKind
    text: Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR_CHARS)] = ""
    begins_after: TokenIds = ()
    """Tokens that end an unconstrained first part, such as reasoning: the grammar begins after they occurred in the
    output in this order. Empty: it begins with the output."""


class Pooling(enum.IntEnum):
    """Vector that a request returns instead of tokens."""

    NONE = 0
    """No embedding: tokens are generated."""
    LAST = 1
    """The hidden state of the last token."""
    MEAN = 2
    """The mean of the hidden states of all tokens; such a request reads no prefix cache."""
    MODEL = 3
    """The result of the pooler of a `PoolingModel`, which serves nothing else."""
