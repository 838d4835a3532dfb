"""Settings of the simulator."""

from typing import Literal

from pydantic import Field

from services.config.base import BaseConfig


class SimulatorConfig(BaseConfig):
    """Settings of the `sim` backend: costs, shapes and drafts of the simulated device."""

    sim_step_ms: float = Field(5.0, ge=0)
    """sim: base cost of a step, milliseconds."""
    sim_prefill_token_us: float = Field(5.0, ge=0)
    """sim: cost per prompt token, microseconds."""
    sim_decode_us: float = Field(0.0, ge=0)
    """sim: cost per decoding request, microseconds."""
    sim_weights_ms: float = Field(0.0, ge=0)
    """sim: minimum cost of a step's tokens, for reading the weights, milliseconds."""
    sim_context_token_ns: float = Field(0.0, ge=0)
    """sim: cost per token of context, nanoseconds."""
    sim_hop_ms: float = Field(0.0, ge=0)
    """sim: transfer time from one pipeline stage to the next, milliseconds."""
    sim_hop_token_us: float = Field(0.0, ge=0)
    """sim: transfer time from one pipeline stage to the next per token, microseconds."""
    sim_rigid: bool = False
    """sim: simulate a device with padded shapes, which refuses steps with both prefill and decode."""
    sim_max_volume: int = Field(0, ge=0)
    """sim, rigid: maximum of rows times longest row in a decode step, tokens. 0: no limit."""
    sim_vocab_size: int = Field(0, ge=0)
    """sim: width of the logits. 0: the size of the model's tokenizer."""
    sim_draft_acceptance: Literal["always", "never", "periodic", "request"] = "periodic"
    """sim: which drafts are accepted: all (always), none (never), all except at every third position of a sequence
    (periodic), or a rule that follows from prompt and seed: all, none, or all except every second, third or fifth
    (request)."""
    sim_draft_ms: float = Field(0.0, ge=0)
    """sim: cost of proposing one draft for each request, milliseconds."""
    sim_max_step_tokens: int = Field(0, ge=0)
    """sim: number of tokens beyond which a step runs out of memory. 0: no limit."""
    sim_fault_token: int | None = Field(None, ge=0)
    """sim: token id in a prompt that makes the step fail in which the prompt enters. Default: none."""
    sim_fault: Literal["error", "exit", "hang", "freeze"] = "error"
    """sim: effect of such a step: an error, the end of the process (exit), a step that never ends (hang), or a process
    no thread of which runs (freeze)."""
