"""The answer of a trial process, as msgpack."""

import msgspec


class TrialVerdict(msgspec.Struct, array_like=True, frozen=True):
    """Result of a trial. It answers a `StructuredOutputParams`, and the `GrammarVocabulary` before them."""

    error: str = ""
    """Reason of a refusal, for the client. Empty: the grammar can be served."""
    grammar: str = ""
    """llguidance's grammar."""
    num_bytes: int = 0
    """Memory of the compiled grammar with its first mask."""
    growth: int = 0
    """Bytes that a short output added: states of the lexer, which all copies share."""
