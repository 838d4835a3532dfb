"""Messages between the scheduler and a trial process, as msgpack."""

import msgspec


class TrialSetup(msgspec.Struct, array_like=True, frozen=True):
    """First message to a trial process. A `TrialVerdict` answers it."""

    tokenizer: str
    """Content of tokenizer.json."""
    num_tokens: int
    eos_token_ids: tuple[int, ...]
    n_vocab: int


class TrialVerdict(msgspec.Struct, array_like=True, frozen=True):
    """Result of a trial, from the trial process. It answers a `StructuredOutputParams`."""

    error: str = ""
    """Reason of a refusal, for the client. Empty: the grammar can be served."""
    grammar: str = ""
    """llguidance's grammar."""
    num_bytes: int = 0
    """Memory of the compiled grammar with its first mask."""
    growth: int = 0
    """Bytes that a short output added: states of the lexer, which all copies share."""
