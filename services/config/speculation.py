"""Settings of speculative decoding."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from services.config.base import BaseConfig


class SpeculativeConfig(BaseConfig):
    """Method and number of drafts in speculative decoding. The field names are vLLM's."""

    method: Literal["ngram", "eagle", "eagle3", "draft_model"]
    num_speculative_tokens: int = Field(ge=1, le=16)
    model: str = ""
    """Directory or Hugging Face name of the drafter's checkpoint. Empty with "eagle": the head of the demo model."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    max_model_len: int | None = Field(None, ge=1)
    """Longest sequence that gets drafts, tokens. None: the limit of the drafter's checkpoint."""
    prompt_lookup_min: int = Field(2, ge=1, le=64)
    """ngram: shortest match, tokens."""
    prompt_lookup_max: int = Field(5, ge=1, le=64)
    """ngram: longest match, tokens."""
    adaptive: bool = True
    """Propose the number of drafts with the highest measured rate of tokens. False: always `num_speculative_tokens`."""

    @property
    def has_kv_cache(self) -> bool:
        """True if the drafter has its own KV cache, which also needs blocks for the positions of drafts."""
        return self.method != "ngram"

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        if self.method == "ngram" and self.model:
            yield '"method": "ngram" has no model'
        if self.method in ("eagle3", "draft_model") and not self.model:
            yield f'"method": "{self.method}" needs a "model"'
        if self.prompt_lookup_min > self.prompt_lookup_max:
            yield '"prompt_lookup_min" must not be above "prompt_lookup_max"'
