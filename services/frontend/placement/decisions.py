"""Input and output of the placement core, as data."""

import enum

import msgspec


class Condition(enum.StrEnum):
    """State of an engine, as one frontend sees it. Only a READY one gets new requests."""

    CONNECTING = "connecting"
    """No connection yet, or its workers are not ready: it starts, loads or recovers."""
    READY = "ready"
    """It executes requests."""
    DRAINING = "draining"
    """It ends on purpose: it still executes what it has."""
    SILENT = "silent"
    """It has given no sign of life for longer than a live one (doubt, docs/invariants.md). It may only be late."""
    RECOVERING = "recovering"
    """Its workers are lost, and were not back in time; its scheduler lives."""
    GONE = "gone"
    """Lost: its connection broke, or it was silent for too long."""


MOVES_STREAMS = (Condition.DRAINING, Condition.RECOVERING, Condition.GONE)
"""Conditions of an engine whose streams move."""
MAY_SERVE = (Condition.CONNECTING, Condition.SILENT, Condition.RECOVERING, Condition.GONE)
"""Conditions of an engine that may become READY without a change by an administrator."""


class Role(enum.StrEnum):
    """Requests that an engine gets, as long as there are engines for the rest."""

    BOTH = "both"
    PREFILL = "prefill"
    """It computes long prompts; their streams move when that is done."""
    DECODE = "decode"
    """It gets the streams of these prompts, and all other requests."""


class EngineReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine as its last message, and the frontend's measurements, show it."""

    condition: Condition
    identity: str = ""
    """Digest of all that a stream's tokens depend on: weights, dtype, tokenizer, batch invariance. "": unknown."""
    queue_seconds: float = 0.0
    """Expected time before the first step of a new request."""
    block_size: int = 0
    """Tokens per KV block; 0: unknown, nothing is known of its prefix cache."""
    seconds_per_prompt_token: float = 0.0
    """Measured time to compute a prompt token; 0.0: unknown."""
    num_streams: int = 0
    """Open requests on the engine, those of other frontends included."""
    seconds_per_output_token: float = 0.0
    """Measured time between two tokens of a stream; 0.0: unknown. A stream that waits longer counts with its wait."""
    role: Role = Role.BOTH


class Reason(enum.StrEnum):
    """Reason of a decision; a label of metrics."""

    ONLY_ENGINE = "only_engine"
    PREFIX = "prefix"
    """The engine holds a prefix of the prompt."""
    LOAD = "load"
    """Other engines hold a prefix of the prompt, but to wait for them costs more than it saves."""
    NO_PREFIX = "no_prefix"
    """No ready engine is known to hold a prefix of the prompt."""
    POLICY = "policy"
    """The policy does not look at prefixes."""
    PREFILL = "prefill"
    """A long part of the prompt must be computed, and this engine computes prompts for others."""
    PREFILLED = "prefilled"
    """The stream's prompt is computed, and its engine computes only prompts."""
    LOST = "lost"
    """The stream's engine is gone, or its workers are."""
    DRAINING = "draining"
    SLOW = "slow"
    """The stream's engine is far slower than others."""


class Place(msgspec.Struct, frozen=True, tag="place"):
    """Send the request to this engine. It counts as placed there from now on."""

    engine: str
    reason: Reason
    hit_tokens: int = 0
    """Tokens that the engine is expected to find in its prefix cache."""
    holder: str = ""
    """Another engine that is expected to have more of the prefix; "": there is none."""


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """Keep the request, and call `place` again when an engine has changed: one is expected to serve."""

    reason: str


class RefuseRequest(msgspec.Struct, frozen=True, tag="refuse"):
    """End the request with an error."""

    message: str
    """One line for the client."""


class Move(msgspec.Struct, frozen=True, tag="move"):
    """Send the stream, with its delivered tokens, to another engine. It counts as placed there from now on."""

    key: int
    source: str
    target: str
    reason: Reason


class LoadAhead(msgspec.Struct, frozen=True, tag="load_ahead"):
    """Let the engine that the stream will move to fetch the first blocks of its prompt, which are complete."""

    key: int
    target: str
    num_tokens: int


Decision = Place | Hold | RefuseRequest
