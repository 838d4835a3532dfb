"""Messages between the scheduler and a trial process: frames of a length (4 bytes, little-endian) and msgpack."""

import msgspec

from protocol.sampling import StructuredOutputParams

HEADER_BYTES = 4


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


_SETUP = msgspec.msgpack.Decoder(TrialSetup)
_PARAMS = msgspec.msgpack.Decoder(StructuredOutputParams)
_VERDICT = msgspec.msgpack.Decoder(TrialVerdict)


def encode(message: TrialSetup | StructuredOutputParams | TrialVerdict) -> bytes:
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(HEADER_BYTES, "little") + content


def decode_setup(content: bytes) -> TrialSetup:
    return _SETUP.decode(content)


def decode_params(content: bytes) -> StructuredOutputParams:
    return _PARAMS.decode(content)


def decode_verdict(content: bytes) -> TrialVerdict:
    return _VERDICT.decode(content)
