"""What scheduler and trial process say to one another: frames of a length (4 bytes, little-endian) and msgpack."""

import msgspec

from protocol.sampling import StructuredOutputParams

HEADER_BYTES = 4


class Setup(msgspec.Struct, array_like=True, frozen=True):
    """The first frame, to the trial process; answered by a `Verdict`."""

    tokenizer: str
    """tokenizer.json."""
    num_tokens: int
    eos_token_ids: tuple[int, ...]
    n_vocab: int


class Verdict(msgspec.Struct, array_like=True, frozen=True):
    """What became of a `StructuredOutputParams`, from the trial process."""

    error: str = ""
    """Why it cannot be served, for the client; empty: it can."""
    grammar: str = ""
    """For the library."""
    num_bytes: int = 0
    """Memory of the compiled grammar with its first mask."""
    growth: int = 0
    """By how much a short answer made it grow: states of the lexer, which its copies share."""


_SETUP = msgspec.msgpack.Decoder(Setup)
_JOB = msgspec.msgpack.Decoder(StructuredOutputParams)
_VERDICT = msgspec.msgpack.Decoder(Verdict)


def encode(message: Setup | StructuredOutputParams | Verdict) -> bytes:
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(HEADER_BYTES, "little") + content


def decode_setup(content: bytes) -> Setup:
    return _SETUP.decode(content)


def decode_job(content: bytes) -> StructuredOutputParams:
    return _JOB.decode(content)


def decode_verdict(content: bytes) -> Verdict:
    return _VERDICT.decode(content)
